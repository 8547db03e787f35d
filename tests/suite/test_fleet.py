"""Sim workers by the dozen in one process, and workers that come and go under load."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from pathlib import Path

from headrace.inference.v1 import inference_pb2
from headrace_cli.policy import set_policy
from tests.suite.deployment import Suite, prompt_of, suite
from tests.suite.fleet import Fleet

REMOTE = inference_pb2.PREFILL_PLACEMENT_REMOTE


async def test_a_process_hosts_many_workers(tmp_path: Path) -> None:
    async with suite(tmp_path, prefill_count=9, decode_count=12) as it:
        assert {child.spec.name for child in it.deployment.children} == {
            "registry",
            "router",
            "prefill",
            "decode",
        }
        ports = it.child("decode").spec.port_file.read_text().split()
        assert len(set(ports)) == 12
        prompts = [prompt_of(80 + number % 40, number) for number in range(60)]
        outcomes = await asyncio.gather(*(it.generate(one, 8, placement=REMOTE) for one in prompts))
        for prompt, outcome in zip(prompts, outcomes, strict=True):
            assert outcome.token_ids == it.expected(prompt, 8)
            assert outcome.last.usage.transferred_tokens == len(prompt) - 1
        timings = [outcome.last.timing for outcome in outcomes]
        decodes = Counter(timing.decode_worker_id for timing in timings)
        prefills = {timing.prefill_worker_id for timing in timings}
        assert set(decodes) <= {f"decode-{number}" for number in range(12)}
        assert prefills <= {f"prefill-{number}" for number in range(9)}
        assert len(decodes) >= 10
        assert max(decodes.values()) <= 15
        assert len(prefills) >= 5
        # A span says which of the workers made it.
        trace = await it.trace(outcomes[0].trace_id)
        assert {span.worker_id for span in trace.spans} >= {
            timings[0].decode_worker_id,
            timings[0].prefill_worker_id,
        }


async def churn(
    it: Suite, *, duration_s: float, every_s: float, stream_count: int = 8
) -> tuple[int, int, float]:
    """Adds a worker of each role and takes one away, all the time: a prefill worker with whatever it holds, a decode
    worker once it has ended what it has. Returns changes, requests and the slowest request's seconds.
    """
    generator = random.Random(7)
    fleets = Fleet("prefill", it.deployment.registry), Fleet("decode", it.deployment.registry)
    stop = asyncio.Event()
    slowest_s, request_count, changes = 0.0, 0, 0
    leaving: list[asyncio.Task[None]] = []

    async def load(stream: int) -> None:
        nonlocal slowest_s, request_count
        while not stop.is_set():
            request_count += 1
            prompt = prompt_of(40 + request_count % 90, stream * 1_000_000 + request_count)
            started_s = time.monotonic()
            outcome = await it.generate(prompt, 6, placement=REMOTE)
            assert outcome.token_ids == it.expected(prompt, 6)
            assert outcome.last.timing.attempts <= 2
            slowest_s = max(slowest_s, time.monotonic() - started_s)

    try:
        for fleet in fleets:
            for _ in range(2):
                await fleet.add()
        threads = own_threads()
        loads = [asyncio.create_task(load(stream)) for stream in range(stream_count)]
        end_s = time.monotonic() + duration_s
        while time.monotonic() < end_s and not any(task.done() for task in loads):
            change_s = time.monotonic()
            prefill, decode = fleets
            await asyncio.gather(prefill.add(), decode.add())
            await prefill.guests.pop(generator.randrange(2)).die()
            leaving.append(asyncio.create_task(decode.guests.pop(0).leave()))
            changes += 1
            # Each role's exporter has one of its own while it exports.
            assert len(own_threads()) <= len(threads) + 3, own_threads()
            await asyncio.sleep(max(0.0, change_s + every_s - time.monotonic()))
        stop.set()
        await asyncio.gather(*loads, *leaving)
    finally:
        stop.set()
        await asyncio.gather(*(fleet.close() for fleet in fleets))
    return changes, request_count, slowest_s


def own_threads() -> list[str]:
    """Threads of this process, less those of a pool that the event loop bounds."""
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if not name.startswith("asyncio")]


async def test_workers_come_and_go_under_load(tmp_path: Path) -> None:
    async with suite(tmp_path) as it:
        await set_policy(it.deployment.registry, ["retry_budget=1"])
        changes, request_count, slowest_s = await churn(it, duration_s=6.0, every_s=0.5)
        assert changes >= 6
        assert request_count > 50
        assert slowest_s < 8.0
