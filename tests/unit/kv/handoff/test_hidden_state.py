"""Hidden states on the handoff stream: accepted once, complete, unchanged and of the form that is due."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random

import pytest

from headrace.kv.v1 import handoff_pb2
from headrace_common.errors import HeadraceError, KvCorrupt, LayoutMismatch, ProtocolViolation
from headrace_kv.hidden_state import (
    BYTES_MAX,
    HiddenFormat,
    IncomingHiddenState,
    hidden_state_message,
    hidden_state_rank,
)
from headrace_kv.layout import KvLayout

SEED = 7
FORM = HiddenFormat("bfloat16", 50)


def message() -> handoff_pb2.HiddenState:
    return hidden_state_message("x1", Random(1).randbytes(FORM.nbytes), SEED).hidden_state


@pytest.mark.parametrize("stages, ranks, expected", [(1, 1, 0), (1, 4, 0), (3, 2, 4)])
def test_the_first_rank_of_the_last_stage_sends_hidden_states(
    stages: int, ranks: int, expected: int
) -> None:
    layout = KvLayout("m", ranks, (), tuple(range(stages)))
    assert hidden_state_rank(layout) == expected


@pytest.mark.parametrize(
    ("form", "supported"),
    [
        (FORM, True),
        (HiddenFormat("float32", BYTES_MAX // 4), True),
        (HiddenFormat("float32", BYTES_MAX // 4 + 1), False),
        (HiddenFormat("float64", 50), False),
        (HiddenFormat("bfloat16", 0), False),
    ],
    ids=str,
)
def test_forms_that_one_message_carries(form: HiddenFormat, supported: bool) -> None:
    assert form.is_supported == supported


async def test_a_waiter_gets_what_is_received_or_none_at_the_end() -> None:
    for ends in (False, True):
        incoming = IncomingHiddenState("x1", FORM)
        waiting = asyncio.create_task(incoming.wait())
        await asyncio.sleep(0)
        if ends:
            incoming.end()
        else:
            incoming.receive(message(), SEED)
        assert await waiting == (None if ends else message().data)


def test_none_is_accepted_where_none_is_due_or_another_was_received() -> None:
    received = IncomingHiddenState("x1", FORM)
    received.receive(message(), SEED)
    for incoming in (IncomingHiddenState("x1", None), received):
        assert incoming.complete
        with pytest.raises(ProtocolViolation):
            incoming.receive(message(), SEED)


def test_a_worker_with_other_hidden_states_is_refused_with_both_forms() -> None:
    incoming = IncomingHiddenState("x1", FORM)
    incoming.require_equal(HiddenFormat("bfloat16", 50))
    for other in (HiddenFormat("float16", 50), HiddenFormat("bfloat16", 51), None):
        with pytest.raises(LayoutMismatch, match="50 x bfloat16"):
            incoming.require_equal(other)
    IncomingHiddenState("x1", None).require_equal(None)


WRONG: dict[str, tuple[Callable[[handoff_pb2.HiddenState], None], type[HeadraceError]]] = {
    "short": (lambda state: setattr(state, "data", state.data[:-1]), ProtocolViolation),
    "long": (lambda state: setattr(state, "data", bytes(101)), ProtocolViolation),
    "no digest": (lambda state: state.ClearField("digest"), KvCorrupt),
    "one byte": (lambda state: setattr(state, "data", state.data[:-1] + b"!"), KvCorrupt),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_hidden_state_is_refused(name: str) -> None:
    change, error = WRONG[name]
    incoming, state = IncomingHiddenState("x1", FORM), message()
    change(state)
    with pytest.raises(error, match="x1"):
        incoming.receive(state, SEED)
    assert not incoming.complete
