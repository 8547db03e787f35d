"""What slows a request down is the greatest part of its sum, and its trace names the link or the layer.

The prefill worker's wall clock is 3 s ahead meanwhile.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headrace.inference.v1 import first_token_pb2, inference_pb2
from headrace_common.latency.parts import Sum, TimePart, sum_from_proto
from headrace_common.telemetry import schema
from headrace_common.trace_view.reading import read_trace
from headrace_common.trace_view.verdict import verdict
from tests.security.shifted_clock import ShiftedClock, compile_clock_shim
from tests.suite.deployment import Suite, greedy, prompt_of, suite
from tests.suite.slow_process import SLOW_LAYER, SLOW_RANK, Delays

REMOTE = inference_pb2.PREFILL_PLACEMENT_REMOTE
DELAY_S = 0.15
LINK_DELAY_S = 0.05
# Clocks of two hosts border on the exposed transfer.
LINK_SHARE = 0.9
AHEAD_S = 3.0
ATTEMPTS = 6
SETTINGS = (
    ("prefill", "model", "sim:layers=4"),
    ("decode", "model", "sim:layers=4,decode_step_s=0.01"),
)


def greatest(times: Sum) -> TimePart:
    """The part with the most time."""
    return max(times.parts_us, key=times.parts_us.__getitem__)


class Slow:
    """A deployment with delays, and the sums of its requests."""

    def __init__(self, it: Suite, delays: Delays) -> None:
        self.it = it
        self.delays = delays

    async def sum_of(self, seed: int) -> Sum:
        request = greedy(prompt_of(60, seed), 2, REMOTE, f"slow-{seed}")
        request.include_latency = True
        request.first_token = first_token_pb2.FIRST_TOKEN_POLICY_DECODE
        outcome = await self.it.ask(request)
        found = sum_from_proto(outcome.last.timing.latency.first_token)
        assert sum(found.parts_us.values()) == found.total_us
        assert found[TimePart.UNACCOUNTED] * 50 <= found.total_us
        return found

    async def found(self, seed: int) -> tuple[Sum, str]:
        """The sum of a request, and the sentence about its trace."""
        total = await self.sum_of(seed)
        return total, verdict(read_trace(await self.it.trace(f"slow-{seed}")))


LINK = rf"link prefill-0/r0 -> decode-0/r{SLOW_RANK} moved at [<0-9.]+ GB/s, median is "
LAYER = f"layer {SLOW_LAYER} took [0-9]+ ms on prefill-0, median is "


async def test_a_slow_step_is_the_greatest_part(tmp_path: Path) -> None:
    clock = ShiftedClock(compile_clock_shim(tmp_path), tmp_path, AHEAD_S)
    delays = Delays(tmp_path / "delays")
    delays.folder.mkdir()
    async with suite(
        tmp_path,
        spawning=lambda spawn: delays.spawning(clock.shifting(spawn, "prefill"), "prefill"),
        decode_tensor_parallel=2,
        settings=SETTINGS,
    ) as it:
        deployed = Slow(it, delays)
        # The first transfer connects.
        await deployed.sum_of(1)
        await check_slow_step(deployed, "link", LINK_DELAY_S, TimePart.TRANSFER_EXPOSED, LINK)
        await check_slow_step(deployed, "layer", DELAY_S, TimePart.PREFILL, LAYER)
        await check_order_with_a_wrong_clock(deployed)


async def check_slow_step(
    deployed: Slow, what: str, delay_s: float, part: TimePart, words: str
) -> None:
    deployed.delays.set(**{what: delay_s})
    found, said = await deployed.found(100 + part)
    for attempt in range(2, ATTEMPTS + 1):
        if greatest(found) is part and re.search(words, said):
            break
        # A busy machine may slow the other link too, or another step.
        found, said = await deployed.found(100 * attempt + part)
    deployed.delays.set()
    assert greatest(found) is part, found
    assert found[part] >= 1e6 * LINK_SHARE * delay_s
    assert re.search(words, said), said


async def check_order_with_a_wrong_clock(deployed: Slow) -> None:
    await deployed.sum_of(60)
    trace = await deployed.it.trace("slow-60")
    named = {span.name: span for span in trace.spans}
    compute, wait = named[schema.SPAN_PREFILL_COMPUTE], named[schema.SPAN_DECODE_KV_WAIT]
    error_ms = float(compute.attributes[schema.ATTRIBUTE_CLOCK_ERROR_MS])
    ahead_ms = float(compute.attributes[schema.ATTRIBUTE_CLOCK_AHEAD_MS])
    assert abs(ahead_ms - 1e3 * AHEAD_S) <= error_ms + 0.1
    # Each worker's clock is measured on its own stream.
    decode_error_ms = float(wait.attributes[schema.ATTRIBUTE_CLOCK_ERROR_MS])
    assert abs(float(wait.attributes[schema.ATTRIBUTE_CLOCK_AHEAD_MS])) <= decode_error_ms + 0.1
    # The root has the same, for readers of spans that the router has not moved.
    root = named[schema.SPAN_REQUEST].attributes
    workers = root[schema.ATTRIBUTE_CLOCK_WORKER_IDS].split(", ")
    known = dict(
        zip(workers, root[schema.ATTRIBUTE_CLOCK_WORKERS_AHEAD_MS].split(", "), strict=True)
    )
    errors = root[schema.ATTRIBUTE_CLOCK_WORKERS_ERROR_MS].split(", ")
    assert set(known) == {"prefill-0", "decode-0"}
    assert abs(float(known["prefill-0"]) - ahead_ms) <= 0.1
    assert error_ms in [pytest.approx(float(text), abs=0.1) for text in errors]
    margin_ns = round(1e6 * (error_ms + decode_error_ms))
    start_ns, ready_ns = compute.start_time.ToNanoseconds(), wait.start_time.ToNanoseconds()
    assert ready_ns - margin_ns <= start_ns
    end_ns = start_ns + compute.duration.ToNanoseconds()
    assert end_ns <= ready_ns + wait.duration.ToNanoseconds() + margin_ns
