"""What requests cost: tenants, the operator and idle time add up to the workers' time."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from headrace.worker.v1 import worker_pb2
from headrace_cli.commands.usage import By, focus_rows, sums_by
from headrace_client import Client
from tests.suite.deployment import Suite, greedy, prompt_of, suite

KEYS = {"a": "the-key-of-a-tenant", "b": "the-key-of-another"}
WORKERS = ("prefill-0", "decode-0", "decode-1")
SETTINGS = (
    ("prefill", "model", "sim:prefill_s_per_token=0.0002"),
    ("decode", "model", "sim:decode_step_s=0.02"),
)


async def ask(it: Suite, tenant: str, seed: int, tokens: int) -> int:
    """The attempts of a request. Raises HeadraceError."""
    client = Client(it.channel, api_key=KEYS[tenant])
    request = greedy(prompt_of(64, seed), tokens)
    *_, last = [response async for response in client.stream(request, 60.0)]
    receipt = last.usage.receipt
    assert receipt.decode_device_us > 0
    assert receipt.prefill_device_us + receipt.operator_device_us > 0
    assert receipt.attempts == last.timing.attempts
    return receipt.attempts


async def device_us(it: Suite) -> dict[str, float]:
    """Microseconds of each tenant, and those of the operator's part in the receipts."""
    lines = await it.operator.usages(0)
    receipts = {name: one.receipt for name, one in sums_by(By.TENANT, lines).items()}
    found: dict[str, float] = {
        name: one.prefill_device_us + one.decode_device_us for name, one in receipts.items()
    }
    found["operator"] = sum(one.operator_device_us for one in receipts.values())
    return found


def share_us(statuses: dict[str, worker_pb2.WatchStatusResponse], name: str) -> int:
    return sum(getattr(one.device_time, name) for one in statuses.values())


@pytest.mark.timeout(240)
async def test_tenants_operator_and_idle_time_add_up_beside_a_killed_worker(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("".join(f"{key} {tenant}\n" for tenant, key in KEYS.items()))
    settings = (*SETTINGS, ("router", "api_keys_file", str(keys)))
    async with suite(tmp_path, settings=settings) as it:
        await it.wait_joined(1, 1)
        # Three times as much work of one tenant, in the same steps.
        await asyncio.gather(*(ask(it, "aaab"[n % 4], n, 250) for n in range(16)))
        for name in WORKERS[:2]:
            await it.wait_empty(name)
        found = await device_us(it)
        assert found["a"] / found["b"] == pytest.approx(3.0, rel=0.05)
        assert found["operator"] == 0

        await it.add("decode-1", "decode-0")
        await it.wait_joined(1, 2)
        first = {name: await it.status(name) for name in WORKERS}
        before = found
        running = [asyncio.create_task(ask(it, "aaab"[n % 4], 100 + n, 90)) for n in range(16)]
        await it.wait_running("decode-0", "decode-1")
        await asyncio.sleep(0.5)  # Steps of the worker that is killed, which no receipt will have.
        last = {"decode-1": await it.status("decode-1")}
        it.kill("decode-1")
        assert max(await asyncio.gather(*running)) > 1
        for name in WORKERS[:2]:
            await it.wait_empty(name)
            last[name] = await it.status(name)
        found = await device_us(it)
        tenants_us = sum(found.values()) - sum(before.values())
        begin = {name: first[name] for name in last}
        idle_us, computing_us, billed_us = (
            share_us(last, name) - share_us(begin, name)
            for name in ("idle_us", "computing_us", "billed_us")
        )
        wall_us = sum(1e-3 * (last[name].sent_unix_ns - first[name].sent_unix_ns) for name in last)
        operator_us = computing_us - billed_us
        assert operator_us > 0
        assert tenants_us + operator_us + idle_us == pytest.approx(wall_us, rel=0.01)
        # What the receipts have is what the workers have given, to a step of each of the killed one's requests.
        assert tenants_us == pytest.approx(billed_us, rel=0.01)
        rows = list(focus_rows(await it.operator.usages(0)))
        assert sum(row[3] for row in rows if row[4] == "Seconds") == pytest.approx(
            1e-6 * sum(found.values())
        )
