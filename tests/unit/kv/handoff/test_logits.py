"""Logits in parts: accepted only in order, complete and unchanged."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random

import pytest

from headrace.kv.v1 import handoff_pb2
from headrace_common.errors import HeadraceError, KvCorrupt, ProtocolViolation
from headrace_kv.handoff.logits import PART_BYTES, IncomingLogits, logits_parts, logits_rank
from headrace_kv.layout.layout import KvLayout

SEED = 7


def parts_of(size: int) -> tuple[bytes, list[handoff_pb2.LogitsPart]]:
    logits = Random(size).randbytes(size)
    return logits, [request.logits for request in logits_parts("x1", logits, SEED)]


@pytest.mark.parametrize("stages, ranks, expected", [(1, 1, 0), (1, 4, 0), (3, 2, 4)])
def test_the_first_rank_of_the_last_stage_sends_logits(
    stages: int, ranks: int, expected: int
) -> None:
    layout = KvLayout("m", ranks, (), tuple(range(stages)))
    assert logits_rank(layout) == expected


async def test_a_waiter_gets_none_when_the_logits_end() -> None:
    incoming = IncomingLogits("x1", 8)
    waiting = asyncio.create_task(incoming.wait())
    await asyncio.sleep(0)
    incoming.end()
    assert await waiting is None


def test_a_part_is_refused_where_none_is_due() -> None:
    incoming = IncomingLogits("x1", 0)
    assert incoming.complete
    with pytest.raises(ProtocolViolation):
        incoming.receive_part(parts_of(8)[1][0], SEED)


Change = Callable[[handoff_pb2.LogitsPart], None]
WRONG: dict[str, tuple[int, Change, type[HeadraceError]]] = {
    "size": (0, lambda part: setattr(part, "total_bytes", 99), ProtocolViolation),
    "gap": (1, lambda part: setattr(part, "start_byte", PART_BYTES + 1), ProtocolViolation),
    "again": (1, lambda part: setattr(part, "start_byte", 0), ProtocolViolation),
    "empty": (0, lambda part: setattr(part, "data", b""), ProtocolViolation),
    "huge": (0, lambda part: setattr(part, "data", bytes(PART_BYTES + 1)), ProtocolViolation),
    "over": (1, lambda part: setattr(part, "data", bytes(101)), ProtocolViolation),
    "no digest": (1, lambda part: part.ClearField("digest"), ProtocolViolation),
    "one byte": (1, lambda part: setattr(part, "data", bytes(100)), KvCorrupt),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_part_is_refused(name: str) -> None:
    place, change, error = WRONG[name]
    _, parts = parts_of(PART_BYTES + 100)
    incoming = IncomingLogits("x1", PART_BYTES + 100)
    for part in parts[:place]:
        incoming.receive_part(part, SEED)
    change(parts[place])
    with pytest.raises(error, match="x1"):
        incoming.receive_part(parts[place], SEED)
    assert not incoming.complete


def test_a_part_after_the_last_is_refused() -> None:
    _, parts = parts_of(8)
    incoming = IncomingLogits("x1", 8)
    incoming.receive_part(parts[0], SEED)
    with pytest.raises(ProtocolViolation):
        incoming.receive_part(parts[0], SEED)
