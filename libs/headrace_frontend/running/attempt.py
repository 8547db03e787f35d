"""An admitted request, an attempt at it that a decode worker drives, and the end of its response."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import inference_pb2, keep_pb2, sampling_pb2
from headrace_common.deadlines import Deadline
from headrace_common.durations import duration_from_ns
from headrace_common.errors import ProtocolViolation
from headrace_common.identity import new_transfer_id
from headrace_common.latency.breakdown import breakdown_to_proto
from headrace_frontend.admission.admission import AdmissionPermit
from headrace_frontend.promises import kept_of
from headrace_frontend.request.response_stream import ResponseStream
from headrace_frontend.request.validation import PreparedRequest, decode_request
from headrace_frontend.running.record import AttemptRecord, RequestRecord
from headrace_kv.layout import WorkerRef


@dataclass(slots=True)
class AdmittedRequest:
    """A valid request with everything that a dispatcher needs to run it. It must not be changed.

    `check_arrival`: see RequestRunner.
    """

    prepared: PreparedRequest
    response: ResponseStream
    deadline: Deadline
    record: RequestRecord
    permit: AdmissionPermit
    check_arrival: Callable[[AdmittedRequest], None]

    async def wait_for_room(self) -> None:
        """Waits until it may ask again, after workers had no blocks.

        Raises QueueFull, DeadlineExceeded or FirstTokenLate.
        """
        self.check_arrival(self)
        await self.permit.wait_for_room()

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


class RunningAttempt:
    """Adds tokens to the response as they arrive. It continues after the tokens that the response has already.

    Each method reports an event. `ended` has the outcome, or the error with which the attempt failed. Later events are
    ignored.
    """

    def __init__(self, request: AdmittedRequest, decode_worker: WorkerRef, *, remote: bool) -> None:
        """`remote`: whether a prefill worker computes the prompt. The caller calls `lead`."""
        self.request = request
        self.decode_worker = decode_worker
        self.ended: asyncio.Future[AttemptOutcome] = asyncio.get_running_loop().create_future()
        self.response = request.response
        self.given = request.response.generated
        self._call = decode_request(
            request.prepared,
            new_transfer_id(),
            self.given,
            incarnation=decode_worker.incarnation,
            remote_prefill=remote,
        )
        self.vocabulary_size = request.prepared.codec.vocabulary_size
        self._reserved: decode_pb2.Reserved | None = None
        self.generates = False
        """Whether the decode worker has computed a token from the KV cache."""

    def lead(self) -> None:
        """From now on the response gets its tokens from this attempt."""
        self.response.attempt_started(self.decode_worker, self._stopped, self._drained)

    def add_batch(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[sampling_pb2.TokenLogprobs] = (),
        prompt_logprobs: Sequence[sampling_pb2.TokenLogprobs] = (),
    ) -> bool:
        """New tokens. False when there is no room for more before `_drained`."""
        if self.ended.done():
            return True
        if not self.generates:
            self._begin(len(token_ids))
        return self.response.add_tokens(token_ids, logprobs, prompt_logprobs)

    def finish(self, finished: decode_pb2.Finished) -> None:
        """The decode worker has ended the request."""
        self._require_reservation()
        if records := self.request.record.attempts:
            records[-1].decoded(finished.receipt)
        call = self._call
        kept = None
        if finished.HasField("kept"):
            kept = kept_of(finished.kept, call.incarnation, call.transfer_id)
        cached, transferred = finished.cached_tokens, finished.transferred_tokens
        self._end(self._outcome(finished.reason, cached, transferred, kept))

    def fail(self, error: Exception) -> None:
        """The attempt has failed."""
        if not self.ended.done():
            self.ended.set_exception(error)

    def outcome_of(self, reason: sampling_pb2.FinishReason.ValueType) -> AttemptOutcome:
        """The outcome for a response that ended before the decode worker's Finished, by the reservation's counts."""
        reserved = self._reserved
        if not self._call.remote_prefill or reserved is None:
            return AttemptOutcome(reason)
        start, end = reserved.start_token, reserved.end_token
        return self._outcome(reason, start, end - start)

    def _begin(self, count: int) -> None:
        """The first tokens have arrived."""
        self._require_reservation()
        self.generates = True

    def _stopped(self) -> None:
        """A stop string is complete."""
        self._end(self.outcome_of(sampling_pb2.FINISH_REASON_STOP))

    def _drained(self) -> None:
        """There is room for tokens again."""

    def _require_reservation(self) -> None:
        if self._reserved is None:
            raise ProtocolViolation("the decode worker did not send Reserved first")

    def _end(self, outcome: AttemptOutcome) -> None:
        if not self.ended.done():
            self.ended.set_result(outcome)

    def _outcome(
        self,
        reason: sampling_pb2.FinishReason.ValueType,
        cached_tokens: int,
        transferred_tokens: int,
        kept: keep_pb2.Kept | None = None,
    ) -> AttemptOutcome:
        """Counts only tokens of the prompt: an attempt after others also computes tokens of the completion again."""
        prompt_tokens = len(self.request.prepared.token_ids)
        cached = min(cached_tokens, prompt_tokens)
        return AttemptOutcome(reason, cached, min(transferred_tokens, prompt_tokens - cached), kept)


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
    prompt_tokens = len(request.prepared.token_ids)
    last = record.attempts[-1] if record.attempts else AttemptRecord(0)
    # An answer that has moved began with an earlier attempt.
    prefill_cached = max(
        [one.prefill_cached_tokens for one in record.attempts if not one.error], default=0
    )
    usage = inference_pb2.Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=response.completion_tokens,
        decode_cached_tokens=outcome.cached_tokens,
        transferred_tokens=outcome.transferred_tokens,
        cached_tokens=max(outcome.cached_tokens, min(prefill_cached, prompt_tokens)),
        stored_tokens=last.block_tokens and prompt_tokens - prompt_tokens % last.block_tokens,
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
