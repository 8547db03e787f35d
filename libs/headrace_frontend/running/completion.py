"""A request that is admitted, how its attempts end, and the end of its response: usage and timing."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from headrace.inference.v1 import inference_pb2, keep_pb2, sampling_pb2
from headrace_common.deadlines import Deadline
from headrace_common.durations import duration_from_ns
from headrace_common.latency.breakdown import breakdown_to_proto
from headrace_frontend.request.response_stream import ResponseStream
from headrace_frontend.request.validation import PreparedRequest
from headrace_frontend.running.record import RequestRecord


@dataclass(slots=True)
class AdmittedRequest:
    """A valid request with everything that a dispatcher needs to run it. It must not be changed.

    `slot_wait_s` returns how long it may wait for a decode worker on which its slot is still taken. `wait_for_room`
    waits until it may ask again, after workers had no blocks. It raises QueueFull, DeadlineExceeded or FirstTokenLate.
    """

    prepared: PreparedRequest
    response: ResponseStream
    deadline: Deadline
    record: RequestRecord
    slot_wait_s: Callable[[], float] = lambda: 0.0
    wait_for_room: Callable[[], Awaitable[None]] = lambda: asyncio.sleep(0)

    @property
    def elapsed_s(self) -> float:
        """The time since the arrival."""
        return 1e-9 * (time.monotonic_ns() - self.record.arrival_ns)

    @property
    def prefix_ids(self) -> array[int]:
        """The prompt and the completion so far, as words that prefixes are hashed from."""
        generated = self.response.generated
        # Lookups of the same object are cached.
        prompt = self.prepared.prefix_ids
        return prompt + array("I", generated) if generated else prompt


@dataclass(frozen=True, slots=True)
class AttemptOutcome:
    """How a successful attempt ended. Both counts are of prompt tokens. `kept` is what the worker promises."""

    reason: sampling_pb2.FinishReason.ValueType
    cached_tokens: int = 0
    transferred_tokens: int = 0
    kept: keep_pb2.Kept | None = None


_NO_PROMISE: Final = keep_pb2.Kept(
    reason="the answer ended before the worker's end of it, as at a stop string or with its first token"
)


async def finish_response(
    request: AdmittedRequest,
    outcome: AttemptOutcome,
    *,
    attempts: int,
    prefill_worker_id: str = "",
) -> None:
    """Ends the response, after the prefill worker's report if the client wants the latency.

    `prefill_worker_id` is that of the last attempt.
    """
    response, record = request.response, request.record
    if request.prepared.includes_latency:
        await record.wait_for_report(request.deadline)
    now_ns = time.monotonic_ns()
    worker = response.decode_worker
    usage = inference_pb2.Usage(
        prompt_tokens=len(request.prepared.token_ids),
        completion_tokens=response.completion_tokens,
        decode_cached_tokens=outcome.cached_tokens,
        transferred_tokens=outcome.transferred_tokens,
        receipt=record.receipt_now(),
    )
    if request.prepared.keep_s is not None:
        usage.kept.CopyFrom(outcome.kept or _NO_PROMISE)
    timing = inference_pb2.Timing(
        time_to_first_token=duration_from_ns(
            (response.first_token_ns or now_ns) - record.arrival_ns
        ),
        total=duration_from_ns((response.last_token_ns or now_ns) - record.arrival_ns),
        decode_worker_id=worker.worker_id if worker is not None else "",
        prefill_worker_id=prefill_worker_id,
        attempts=attempts,
    )
    if request.prepared.includes_latency:
        timing.latency.CopyFrom(breakdown_to_proto(record.break_down()))
    response.finish(outcome.reason, usage, timing)
