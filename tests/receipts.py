"""What a deployment's requests cost, beside what its workers have computed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from headrace.inference.v1 import inference_pb2
from headrace.worker.v1 import worker_pb2
from headrace_cli.usage import By, focus_rows, sums_by
from headrace_client import Client
from tests.suite.deployment import Suite
from tests.waiting import until

_KEYS = {"a": "the-key-of-a-tenant", "b": "the-key-of-another"}
_WORKERS = ("prefill-0", "decode-0", "decode-1")
_Statuses = dict[str, worker_pb2.WatchStatusResponse]


def with_keys(folder: Path) -> tuple[str, str, str]:
    """The setting with which a router has two tenants."""
    keys = folder / "keys"
    keys.write_text("".join(f"{key} {tenant}\n" for tenant, key in _KEYS.items()))
    return "router", "api_keys_file", str(keys)


async def _ask(it: Suite, tenant: str, request: inference_pb2.GenerateRequest) -> int:
    """The attempts of a request. Raises HeadraceError."""
    client = Client(it.channel, api_key=_KEYS[tenant])
    *_, last = [response async for response in client.stream(request, 90.0)]
    receipt = last.usage.receipt
    assert receipt.decode_device_us > 0
    assert receipt.prefill_device_us + receipt.operator_device_us > 0
    assert receipt.attempts == last.timing.attempts
    return receipt.attempts


async def _device_us(it: Suite) -> dict[str, float]:
    """Microseconds of each tenant, and those of the operator's part in the receipts."""
    lines = await it.operator.usages(0)
    receipts = {name: one.receipt for name, one in sums_by(By.TENANT, lines).items()}
    found: dict[str, float] = {
        name: one.prefill_device_us + one.decode_device_us for name, one in receipts.items()
    }
    found["operator"] = sum(one.operator_device_us for one in receipts.values())
    return found


def _has_billed_all(status: worker_pb2.WatchStatusResponse) -> bool:
    time = status.device_time
    return not status.running_requests and time.computing_us - time.billed_us < 50_000


def _added(first: _Statuses, last: _Statuses, name: str) -> int:
    return sum(
        getattr(last[worker].device_time, name) - getattr(first[worker].device_time, name)
        for worker in last
    )


async def check_tenants(it: Suite, requests: Sequence[inference_pb2.GenerateRequest]) -> float:
    """One tenant has three times as much work in the same steps. Returns the ratio of what both pay."""
    before = await _device_us(it)
    await asyncio.gather(*(_ask(it, "aaab"[n % 4], one) for n, one in enumerate(requests)))
    for name in _WORKERS[:2]:
        await it.wait_empty(name)
    found = await _device_us(it)
    assert found["operator"] == 0
    return (found["a"] - before.get("a", 0.0)) / found["b"]


async def check_sums(it: Suite, requests: Sequence[inference_pb2.GenerateRequest]) -> float:
    """A worker is killed beside the requests. Returns the sum of what all pay and idle time, per second of a worker."""
    await it.wait_joined(1, 2)
    first = {name: await it.status(name) for name in _WORKERS}
    before = await _device_us(it)
    running = [asyncio.create_task(_ask(it, "ab"[n % 2], one)) for n, one in enumerate(requests)]
    await it.wait_running("decode-0", "decode-1")
    await asyncio.sleep(0.5)  # Steps of the worker that is killed, which no receipt will have.
    last = {"decode-1": await it.status("decode-1")}
    seen_us = last["decode-1"].device_time.computing_us

    def is_new(status: worker_pb2.WatchStatusResponse) -> bool:
        last["decode-1"] = status
        return status.device_time.computing_us > seen_us

    # An engine's process reports its steps four times a second.
    await it.until("decode-1", is_new)
    it.kill("decode-1")
    assert max(await asyncio.gather(*running)) > 1
    for name in _WORKERS[:2]:
        await it.until(name, _has_billed_all)
        last[name] = await it.status(name)
    found = await _device_us(it)
    paid_us = sum(found.values()) - sum(before.values())
    wall_us = sum(1e-3 * (last[name].sent_unix_ns - first[name].sent_unix_ns) for name in last)
    idle_us, computing_us, billed_us = (
        _added(first, last, name) for name in ("idle_us", "computing_us", "billed_us")
    )
    lost_us = computing_us - billed_us
    assert lost_us > 0
    # Receipts have what the workers have given them.
    assert paid_us == pytest.approx(billed_us, rel=0.01)
    rows = focus_rows(await it.operator.usages(0))
    seconds = sum(row[3] for row in rows if row[4] == "Seconds")
    assert seconds == pytest.approx(1e-6 * sum(found.values()))
    return (paid_us + lost_us + idle_us) / wall_us


async def check_cancelled(it: Suite, request: inference_pb2.GenerateRequest) -> None:
    """A client that gives its request up pays for it."""
    started = asyncio.Event()

    async def read() -> None:
        count = 0
        async for response in Client(it.channel, api_key=_KEYS["a"]).stream(request, 60.0):
            count += len(response.token_ids)
            if count > 4:
                started.set()

    reading = asyncio.create_task(read())
    await started.wait()
    reading.cancel()
    for name in _WORKERS[:2]:
        await it.wait_empty(name)
    found: dict[str, object] = {}

    async def all_is_paid() -> bool:
        times = [(await it.status(name)).device_time for name in _WORKERS[:2]]
        given_us, computing_us = (
            sum(getattr(one, name) for one in times) for name in ("billed_us", "computing_us")
        )
        paid_us = (await _device_us(it)).get("a", 0.0)
        found.update(given_us=given_us, computing_us=computing_us, paid_us=paid_us)
        # The request has no share of the step in which it was aborted.
        return computing_us - 100_000 < given_us and abs(paid_us - given_us) < 100 and paid_us > 0

    await until(all_is_paid, what=lambda: str(found))
