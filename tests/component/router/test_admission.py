"""Admission over real gRPC: keys, bounds, fair shares, deadlines."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from headrace.decode.v1 import decode_pb2
from headrace.registry.v1 import registry_pb2
from headrace_common.errors import DecodeFull, QueueFull, Unauthenticated
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
