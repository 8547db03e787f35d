"""Admission over real gRPC: keys, bounds, fair shares, deadlines."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import sampling_pb2
from headrace.registry.v1 import registry_pb2
from headrace_common.durations import duration_from_seconds
from headrace_common.errors import (
    DecodeFull,
    FirstTokenLate,
    HeadraceError,
    QueueFull,
    Unauthenticated,
)
from tests.kit.router import Rig, with_settings
from tests.kit.workers import FakeDecode, Script, finished, hang, reject, reply, reserved, tokens
from tests.waiting import until

_TENANTS = {"key-greedy": "greedy", "key-late": "late"}
keyed = with_settings(tenants=_TENANTS)


async def _errors(tasks: Sequence[asyncio.Task[str]]) -> list[object]:
    for task in tasks:
        task.cancel()
    return await asyncio.gather(*tasks, return_exceptions=True)


@keyed
async def test_with_a_keys_file_a_key_is_required_and_never_logged(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    decode = await rig.add_decode(reply("ok"))
    with pytest.raises(Unauthenticated, match="not known here"):
        await rig.text(key="wrong-key")
    with pytest.raises(Unauthenticated, match="x-api-key"):
        await rig.text()
    assert not decode.requests
    assert await rig.text(key="key-late", timeout_s=10.0) == "ok"
    assert "wrong-key" not in caplog.text
    assert "key-late" not in caplog.text


@with_settings(tenants=_TENANTS, max_concurrent_requests=4)
async def test_a_tenant_gets_the_share_of_its_weight(rig: Rig) -> None:
    rig.policy.tenant_weights["late"] = 3.0
    decode = await rig.add_decode(hang)
    greedy = [asyncio.create_task(rig.text(key="key-greedy", timeout_s=10.0)) for _ in range(4)]
    await until(lambda: len(decode.requests) == 4)
    late = [asyncio.create_task(rig.text(key="key-late", timeout_s=10.0)) for _ in range(4)]
    # The last is above its share of three.
    await until(lambda: sum(task.done() for task in late) == 1)
    for task in greedy[:3]:
        task.cancel()
    await until(lambda: len(decode.requests) == 7)
    (refused,) = (
        error for error in await _errors([*greedy, *late]) if isinstance(error, QueueFull)
    )
    assert refused.retry_after_s
    assert refused.metadata["tenant_share"] == "3"


def _finish_when(event: asyncio.Event) -> Script:
    async def script(worker: FakeDecode, request: decode_pb2.GenerateRequest) -> AsyncIterator[Any]:
        yield reserved(request)
        await event.wait()
        yield tokens("ok")
        yield finished(request)

    return script


@with_settings(tenants=_TENANTS, admission_wait_s=0.2)
async def test_the_slots_of_decode_workers_are_shared_and_a_tenant_below_its_share_waits(
    rig: Rig,
) -> None:
    end = asyncio.Event()
    decode = await rig.add_decode(_finish_when(end))
    greedy = [asyncio.create_task(rig.text(key="key-greedy", timeout_s=10.0)) for _ in range(12)]
    await until(lambda: len(decode.requests) == decode.member.max_num_seqs)
    late = asyncio.create_task(rig.text(key="key-late", timeout_s=10.0))
    # The requests beyond the slots are rejected after the wait. The other tenant's waits on.
    await until(lambda: sum(task.done() for task in greedy) == 4)
    assert not late.done()
    assert len(decode.requests) == decode.member.max_num_seqs
    end.set()
    assert await late == "ok"
    results = await asyncio.gather(*greedy, return_exceptions=True)
    refused = [result for result in results if isinstance(result, QueueFull)]
    assert [one.metadata["queue"] for one in refused] == ["slots"] * 4
    assert all(one.retry_after_s for one in refused)
    assert results.count("ok") == 8


@keyed
async def test_slots_that_other_routers_use_are_not_divided_again(rig: Rig) -> None:
    decode = await rig.add_decode(reply("ok"))
    router = registry_pb2.Member(role=registry_pb2.Member.ROLE_ROUTER)
    members = [decode.member, router, router]
    rig.router.update(members)
    # Of 8 slots, one stays free for the other router's next request, and four are always this router's.
    for external, slots in ((0, 7), (2, 5), (8, 4)):
        decode.running_requests = external
        await until(lambda slots=slots: rig.router.admission.slots == slots)  # type: ignore[misc]
    rig.router.update([decode.member, router])
    assert rig.router.admission.slots == 8


@keyed
async def test_a_taken_slot_is_asked_for_again(rig: Rig) -> None:
    taken = DecodeFull("slots", metadata={"resource": DecodeFull.SLOTS})
    decode = await rig.add_decode(reject(taken))
    asking = asyncio.create_task(rig.text(key="key-late", timeout_s=10.0))
    # More often than the budget of retries allows.
    await until(lambda: len(decode.requests) > 4)
    decode.script = reply("ok")
    assert await asking == "ok"


@dataclass
class Blocks:
    """A worker's KV: a request takes a block for each of its `max_tokens`, until `end`."""

    free: int = 4
    end: asyncio.Event = field(default_factory=asyncio.Event)
    admitted: list[int] = field(default_factory=list)

    async def run(
        self, worker: FakeDecode, request: decode_pb2.GenerateRequest
    ) -> AsyncIterator[Any]:
        needed = request.sampling.max_tokens
        if needed > self.free:
            raise DecodeFull("no blocks", metadata={"resource": DecodeFull.BLOCKS})
        self.free -= needed
        self.admitted.append(needed)
        yield reserved(request)
        await self.end.wait()
        self.free += needed
        yield tokens("ok")
        yield finished(request)


def of_blocks(count: int) -> dict[str, Any]:
    """The fields of a request for so many blocks."""
    return {"sampling": sampling_pb2.SamplingParams(max_tokens=count), "timeout_s": 20.0}


async def test_requests_wait_for_blocks_in_their_order(rig: Rig) -> None:
    blocks = Blocks()
    decode = await rig.add_decode(blocks.run)
    asked = [asyncio.create_task(rig.ask(**of_blocks(1))) for _ in range(4)]
    await until(lambda: len(blocks.admitted) == 4)
    large = asyncio.create_task(rig.ask(**of_blocks(4)))
    await until(lambda: len(decode.requests) > 8)
    small = [asyncio.create_task(rig.ask(**of_blocks(1), n=2)) for _ in range(3)]
    await until(lambda: rig.router.admission.waiting == 7)
    blocks.end.set()
    await asyncio.gather(*asked, large, *small)
    # No small request has overtaken the large one.
    assert blocks.admitted == [1, 1, 1, 1, 4, *[1] * 6]


@with_settings(tenants=_TENANTS, admission_wait_s=0.2)
async def test_a_wait_for_blocks_ends_as_one_for_slots_does(rig: Rig) -> None:
    blocks = Blocks()
    await rig.add_decode(blocks.run)
    blocks.end.set()
    await rig.ask(key="key-greedy", **of_blocks(1))
    blocks.end.clear()
    greedy = [asyncio.create_task(rig.ask(key="key-greedy", **of_blocks(1))) for _ in range(6)]
    # Those beyond the share end with the error of the worker, or of the slots.
    await until(lambda: sum(task.done() for task in greedy) == 2)
    late = asyncio.create_task(rig.ask(key="key-late", **of_blocks(1)))
    await until(lambda: rig.router.admission.waiting == 1)
    with pytest.raises(FirstTokenLate):
        await rig.ask(key="key-late", ttft_target=duration_from_seconds(1e-6), **of_blocks(1))
    assert not late.done()
    blocks.end.set()
    results = await asyncio.gather(late, *greedy, return_exceptions=True)
    refused = [result for result in results if isinstance(result, HeadraceError)]
    assert len(refused) == 2
    assert all(isinstance(one, DecodeFull | QueueFull) and one.retry_after_s for one in refused)
