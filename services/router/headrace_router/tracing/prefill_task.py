"""The record of a prefill task that has ended, and its spans."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanContext

from headrace.prefill.v1 import prefill_pb2
from headrace_common.latency.steps import PrefillSteps
from headrace_common.telemetry import schema
from headrace_common.telemetry.later import SpanMaker
from headrace_frontend.running.record import Attributes


class PrefillTaskRecord(NamedTuple):
    """A prefill task, as its worker has reported it. Its KV went to worker `destination`.

    It computed tokens [start_token, end_token) without the cached ones.
    """

    worker_id: str
    destination: str
    done: prefill_pb2.TaskDone
    steps: PrefillSteps | None
    start_token: int
    end_token: int


def task_spans(
    task: PrefillTaskRecord, maker: SpanMaker, parent: SpanContext, ids: Attributes
) -> Iterator[ReadableSpan]:
    """The spans of a task, below that of its attempt."""
    prefill, done = task.steps, task.done
    if prefill is None:
        return
    ends = (prefill.received, prefill.compute_end, prefill.last_write, prefill.sent)
    cached: Attributes = {schema.ATTRIBUTE_CACHED_TOKENS: done.cached_tokens}
    own = maker.of_steps(
        schema.SPAN_PREFILL,
        parent,
        (prefill.received, max(time or 0 for time in ends)),
        {
            **ids,
            schema.ATTRIBUTE_PREFILL_WORKER_ID: task.worker_id,
            **cached,
            schema.ATTRIBUTE_PAYLOAD_BYTES: done.payload_bytes,
        },
    )
    yield own
    if prefill.compute_start is not None and prefill.compute_end is not None:
        times = (prefill.compute_start, prefill.compute_end)
        tokens = task.end_token - max(task.start_token, done.cached_tokens)
        counts = {**cached, schema.ATTRIBUTE_TOKENS: tokens}
        yield maker.of_steps(schema.SPAN_PREFILL_COMPUTE, own.context, times, counts)
    if done.HasField("last_link"):
        link = done.last_link
        yield maker.of_steps(
            schema.SPAN_TRANSFER_LINK,
            own.context,
            (prefill.received + link.start_us, prefill.received + link.end_us),
            {
                schema.ATTRIBUTE_SOURCE_RANK: link.source_rank,
                schema.ATTRIBUTE_DESTINATION_RANK: link.destination_rank,
                schema.ATTRIBUTE_DECODE_WORKER_ID: task.destination,
                schema.ATTRIBUTE_TRANSPORT: link.transport,
                schema.ATTRIBUTE_STRATEGY: link.strategy,
                schema.ATTRIBUTE_PAYLOAD_BYTES: link.payload_bytes,
                schema.ATTRIBUTE_MOVING_MS: link.moving_us / 1e3,
                schema.ATTRIBUTE_LINK_LAYERS: link.layers,
            },
        )
