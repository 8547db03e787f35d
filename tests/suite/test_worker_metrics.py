"""Workers export transfers, bytes, requests and blocks as metrics."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

from headrace.inference.v1 import inference_pb2
from headrace_common.telemetry import schema
from tests.collector import Collector, collecting
from tests.suite.deployment import prompt_of, suite

REMOTE = inference_pb2.PREFILL_PLACEMENT_REMOTE
REQUESTS = 6


async def wait_exported(condition: Callable[[], bool]) -> None:
    """Waits for an export. Workers export every 5 s."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.05)


def of(worker_id: str, **attributes: str) -> dict[str, str]:
    return {schema.ATTRIBUTE_WORKER_ID: worker_id, **attributes}


async def test_workers_export_metrics_to_a_collector(tmp_path: Path) -> None:
    async with collecting() as (collector, endpoint):
        settings = (
            ("prefill", "otlp_endpoint", endpoint),
            ("decode", "otlp_endpoint", endpoint),
            ("decode", "model", "sim:decode_step_s=0.05"),
        )
        async with suite(tmp_path, settings=settings, decode_count=2) as it:
            prompts = [prompt_of(60, number) for number in range(REQUESTS)]
            outcomes = await asyncio.gather(
                *(it.generate(prompt, 4, placement=REMOTE) for prompt in prompts)
            )
            done = of("prefill-0", **{schema.ATTRIBUTE_END_REASON: "done"})
            await wait_exported(
                lambda: collector.total(schema.METRIC_TRANSFERS, **done) == REQUESTS
            )
            traces = [await it.trace(outcome.trace_id) for outcome in outcomes]
            sent = sum(
                int(span.attributes[schema.ATTRIBUTE_PAYLOAD_BYTES])
                for trace in traces
                for span in trace.spans
                if span.name == schema.SPAN_PREFILL
            )
            assert sent > 0
            assert collector.total(schema.METRIC_TRANSFER_BYTES, **of("prefill-0")) == sent
            await _a_running_request_shows(it.generate(prompt_of(60, 99), 300), collector)
            # Both workers hold nothing.
            for worker_id in ("decode-0", "decode-1"):
                blocks = of(worker_id)
                await wait_exported(
                    lambda blocks=blocks: (  # type: ignore[misc]
                        collector.total(schema.METRIC_BLOCKS_FREE, **blocks)
                        == collector.total(schema.METRIC_BLOCKS_TOTAL, **blocks)
                        > 0
                    )
                )
                assert collector.total(schema.METRIC_BLOCKS_QUARANTINED, **blocks) == 0
                assert collector.total(schema.METRIC_TRANSFERS_ACTIVE, **blocks) == 0


async def _a_running_request_shows(answer: object, collector: Collector) -> None:
    task = asyncio.ensure_future(answer)  # type: ignore[call-overload]
    running = {schema.ATTRIBUTE_WORKER_STATE: "running"}
    try:
        await wait_exported(lambda: collector.total(schema.METRIC_WORKER_REQUESTS, **running) == 1)
        assert collector.total(schema.METRIC_BLOCKS_RESERVED) > 0
        assert collector.total(schema.METRIC_BLOCKS_USED) > 0
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    await wait_exported(lambda: collector.total(schema.METRIC_WORKER_REQUESTS, **running) == 0)
