"""RecordLoad: the load of a router without its text."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import grpc.aio
import pytest

from headrace.inference.v1 import load_pb2, load_pb2_grpc
from headrace_cli.commands.profile import trace_of
from headrace_router.load import RECORDINGS_MAX
from headrace_simulator.trace import read_trace
from tests.kit.router import Rig
from tests.kit.workers import hand_over, reply
from tests.waiting import PATIENCE_S

SHARED = "w" * 600


async def next_long(call: Any) -> load_pb2.RecordLoadResponse:
    """The next record of a prompt with a whole block."""
    while not (record := await call.read()).prefix_hashes:
        pass
    return cast("load_pb2.RecordLoadResponse", record)


async def test_records_have_lengths_and_shared_prefixes_under_a_key_of_the_call(rig: Rig) -> None:
    await rig.add_decode(reply("Paris"))
    await rig.add_prefill(hand_over)
    stub: Any = load_pb2_grpc.LoadServiceStub(rig.internal_channel)
    calls = [stub.RecordLoad(load_pb2.RecordLoadRequest(), timeout=PATIENCE_S) for _ in range(2)]
    begun = [asyncio.ensure_future(call.read()) for call in calls]
    while not all(one.done() for one in begun):
        await rig.ask("until both calls are served")
    for tail in ("a", "b"):
        await rig.ask(SHARED + tail)
    found = [[await next_long(call) for _ in range(2)] for call in calls]
    first, second = found[0]
    assert len(first.prefix_hashes) == first.prompt_tokens // 512 == 1
    assert list(first.prefix_hashes) == list(second.prefix_hashes)
    assert first.answer_tokens == 5
    assert not set(first.prefix_hashes) & set(found[1][0].prefix_hashes)
    requests = read_trace(one.line() for one in trace_of(found[0]))
    assert requests[0].arrival_s == 0
    assert requests[0].hash_ids == requests[1].hash_ids
    for call in calls:
        call.cancel()


async def test_as_many_calls_run_as_may_be(rig: Rig) -> None:
    stub: Any = load_pb2_grpc.LoadServiceStub(rig.internal_channel)

    def begin() -> Any:
        call = stub.RecordLoad(load_pb2.RecordLoadRequest(), timeout=PATIENCE_S)
        return asyncio.ensure_future(call.read())

    reads = [begin() for _ in range(RECORDINGS_MAX + 1)]
    done, _ = await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED)
    (refused,) = done
    with pytest.raises(grpc.aio.AioRpcError, match="operators record the load") as raised:
        refused.result()
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    rig.router.drain()
    ended = await asyncio.gather(*(one for one in reads if one is not refused))
    assert ended == [grpc.aio.EOF] * RECORDINGS_MAX
    with pytest.raises(grpc.aio.AioRpcError, match="shutting down"):
        await begin()
