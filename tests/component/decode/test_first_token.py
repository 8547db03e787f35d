"""First tokens that need no KV on decode: those of SetFirstToken and those from hidden states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc.aio
import pytest

from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import first_token_pb2, sampling_pb2
from headrace.kv.v1 import handoff_pb2
from headrace_common.errors import (
    DuplicateTransfer,
    HeadraceError,
    InternalError,
    InvalidRequest,
    KvCorrupt,
    LayoutMismatch,
    NotFound,
    ProtocolViolation,
    StaleIncarnation,
)
from headrace_common.rpc.status import error_from_rpc
from headrace_common.telemetry import schema
from headrace_engine.interface import DecodeEnded, DecodeTokens
from headrace_kv.hidden_state import HiddenFormat, hidden_state_message
from headrace_kv.tickets import digest_seed
from tests.component.decode.conftest import Served, request
from tests.component.decode.prefill_rank import (
    HIDDEN_FORMAT,
    PIECE_BYTES,
    RESERVATION,
    PrefillRank,
    failure_of,
    ticket_of,
)
from tests.component.decode.scripted_engine import REF
from tests.linked_call import LinkedCall
from tests.waiting import let_a_wrong_step_show, until

PREFILL = first_token_pb2.FIRST_TOKEN_POLICY_PREFILL


async def set_first_token(served: Served, token_id: int = 7, **changes: str) -> None:
    fields = {"transfer_id": "x1", "incarnation": REF.incarnation, **changes}
    await served.decode.SetFirstToken(decode_pb2.SetFirstTokenRequest(token_id=token_id, **fields))


async def refusal(served: Served, token_id: int = 7, **changes: str) -> HeadraceError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await set_first_token(served, token_id, **changes)
    return error_from_rpc(raised.value)


def span_names(served: Served) -> set[str]:
    return {span.name for span in served.spans.get_finished_spans()}


async def test_the_engine_continues_after_the_given_first_token(
    served: Served, rank: PrefillRank
) -> None:
    call = aiter(await served.reserve(first_token=PREFILL))
    (work,) = served.engine.works
    assert work.awaits_first_token
    assert isinstance(await refusal(served, incarnation="another"), StaleIncarnation)
    assert isinstance(await refusal(served, transfer_id="x2"), NotFound)
    await set_first_token(served)
    assert served.engine.first_tokens == [("x1", 7)]
    assert isinstance(await refusal(served, 8), DuplicateTransfer)
    await rank.open()
    rank.land(0, 1)
    await until(lambda: served.engine.arrived_ids == ["x1"], what="arrival")
    served.engine.play(DecodeTokens((9,)), DecodeEnded(True, 0))
    events = [event async for event in call]
    assert list(events[0].tokens.token_ids) == [9]
    assert served.engine.first_tokens == [("x1", 7)]
    await until(lambda: schema.SPAN_DECODE_TOKEN_WAIT in span_names(served), what="the span")
    assert isinstance(await refusal(served), NotFound)


@pytest.mark.parametrize(
    "changes",
    [{"stop_token_ids": [5]}, {"sampling": sampling_pb2.SamplingParams(max_tokens=1)}],
    ids=["stop token", "only token"],
)
async def test_a_token_that_ends_the_answer_is_rejected(
    served: Served, changes: dict[str, Any]
) -> None:
    await served.reserve(first_token=PREFILL, **changes)
    error = await refusal(served, 5)
    assert isinstance(error, InvalidRequest)
    assert set(error.violations) == {"token_id"}
    assert served.engine.first_tokens == []


async def test_a_token_beyond_the_vocabulary_is_rejected_and_the_request_goes_on(
    served: Served,
) -> None:
    await served.reserve(first_token=PREFILL)
    for token_id in (served.engine.vocabulary_size, 2**32 - 1):
        assert isinstance(await refusal(served, token_id), ProtocolViolation)
    await set_first_token(served)
    assert served.engine.first_tokens == [("x1", 7)]


async def test_a_token_before_the_reservation_is_refused(served: Served) -> None:
    waiting = anext(aiter(served.generate(request(first_token=PREFILL))))
    await until(lambda: bool(served.engine.works), what="the request")
    assert isinstance(await refusal(served), InvalidRequest)
    served.engine.play(RESERVATION)
    assert (await waiting).kind == "reserved"
    await set_first_token(served)
    assert served.engine.first_tokens == [("x1", 7)]


# From a hidden state.

FROM_HIDDEN_STATE = first_token_pb2.FIRST_TOKEN_POLICY_HIDDEN
STATE = bytes(range(HIDDEN_FORMAT.nbytes))


async def reserve_from_hidden_state(served: Served, rank: PrefillRank) -> LinkedCall:
    served.engine.hidden_format = HIDDEN_FORMAT
    call = await served.reserve(first_token=FROM_HIDDEN_STATE)
    (work,) = served.engine.works
    assert work.awaits_first_token
    assert work.from_hidden_state
    await rank.open()
    return aiter(call)


async def error_of_next(events: LinkedCall) -> HeadraceError:
    with pytest.raises(HeadraceError) as raised:
        await anext(events)
    return raised.value


def send_hidden_state(rank: PrefillRank, state: bytes) -> None:
    seed = digest_seed(ticket_of("x1"))
    rank.send(hidden_state=hidden_state_message("x1", state, seed).hidden_state)


async def give_state(served: Served, rank: PrefillRank) -> None:
    """Sends the hidden state and waits until the engine has it."""
    send_hidden_state(rank, STATE)
    await until(lambda: bool(served.engine.first_hidden_state_given), what="the state")


async def test_a_token_from_a_hidden_state_is_sent_before_the_kv_is_complete(
    served: Served, rank: PrefillRank
) -> None:
    call = await reserve_from_hidden_state(served, rank)
    assert isinstance(await refusal(served), NotFound)
    await give_state(served, rank)
    assert served.engine.first_hidden_state_given == [("x1", STATE)]
    served.engine.play(DecodeTokens((5,)))
    assert list((await anext(call)).tokens.token_ids) == [5]
    rank.land(0)
    await let_a_wrong_step_show()
    assert served.engine.arrived_ids == []
    rank.land(1)
    await until(lambda: served.engine.arrived_ids == ["x1"], what="arrival")
    served.engine.play(DecodeTokens((6,)), DecodeEnded(False, 0))
    assert list((await anext(call)).tokens.token_ids) == [6]
    finished = (await anext(call)).finished
    assert finished.transferred_tokens == 39
    expected = {
        schema.SPAN_DECODE_HIDDEN_STATE_WAIT,
        schema.SPAN_DECODE_SAMPLE,
        schema.SPAN_DECODE_FIRST_TOKEN,
    }
    await until(lambda: expected <= span_names(served), what="the spans")


async def test_a_second_token_before_the_kv_is_complete_is_an_error(
    served: Served, rank: PrefillRank
) -> None:
    call = await reserve_from_hidden_state(served, rank)
    await give_state(served, rank)
    served.engine.play(DecodeTokens((5, 6)))
    assert isinstance(await error_of_next(call), InternalError)


async def test_kv_without_its_hidden_state_is_incomplete(served: Served, rank: PrefillRank) -> None:
    call = await reserve_from_hidden_state(served, rank)
    rank.land(0, 1)
    await let_a_wrong_step_show()
    assert served.engine.arrived_ids == []
    rank.send(commit=handoff_pb2.Commit(transfer_id="x1", payload_bytes=2 * PIECE_BYTES))
    error = await error_of_next(call)
    assert isinstance(error, ProtocolViolation)
    assert "the hidden state" in error.detail
    await rank.receive("cancel")
    rank.send(quiesced=handoff_pb2.Quiesced(transfer_id="x1"))
    await until(lambda: served.engine.released_ids == ["x1"], what="the blocks")


WRONG: dict[str, tuple[Callable[[handoff_pb2.HiddenState], None], type[HeadraceError]]] = {
    "short": (lambda state: setattr(state, "data", state.data[:-1]), ProtocolViolation),
    "long": (lambda state: setattr(state, "data", bytes(101)), ProtocolViolation),
    "no digest": (lambda state: state.ClearField("digest"), KvCorrupt),
    "one byte": (lambda state: setattr(state, "data", state.data[:-1] + b"!"), KvCorrupt),
}


@pytest.mark.parametrize("name", WRONG)
async def test_a_wrong_hidden_state_fails_only_its_request(
    served: Served, rank: PrefillRank, name: str
) -> None:
    change, kind = WRONG[name]
    call = await reserve_from_hidden_state(served, rank)
    message = hidden_state_message("x1", STATE, digest_seed(ticket_of("x1"))).hidden_state
    change(message)
    rank.send(hidden_state=message)
    assert isinstance(await error_of_next(call), kind)
    assert served.engine.first_hidden_state_given == []
    cancelled = await rank.receive("cancel")
    assert cancelled.cancel.transfer_id == "x1"


@pytest.mark.parametrize(
    "other, named", [(HiddenFormat("float16", 40), "40 x float16"), (None, "no form")]
)
async def test_a_worker_with_other_hidden_states_is_refused_when_it_opens_the_transfer(
    served: Served, other: HiddenFormat | None, named: str
) -> None:
    served.engine.hidden_format = HIDDEN_FORMAT
    await served.reserve(first_token=FROM_HIDDEN_STATE)
    rank = PrefillRank(served.handoff, other)
    rank.send(open=handoff_pb2.Open(transfer_id="x1", ticket=ticket_of("x1")))
    refused = (await rank.receive("cancel")).cancel
    assert refused.reason == LayoutMismatch.reason
    assert refused.detail.endswith(f"of {named}, and decode of 20 x float32")
    rank.leave()


async def test_an_engine_without_hidden_states_is_refused_by_field(served: Served) -> None:
    error = await failure_of(served.generate(request(first_token=FROM_HIDDEN_STATE)))
    assert isinstance(error, InvalidRequest)
    assert set(error.violations) == {"first_token"}
    assert served.engine.works == []
