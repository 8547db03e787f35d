"""A request's attempts: place, try, and try elsewhere while the client has seen nothing."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from typing import Protocol

from google.protobuf.duration_pb2 import Duration
from opentelemetry import trace

from headrace.inference.v1 import inference_pb2, sampling_pb2
from headrace.registry.v1 import registry_pb2
from headrace_common import telemetry_schema as schema
from headrace_common.errors import (
    DecodeFull,
    Draining,
    HeadraceError,
    InvalidRequest,
    LayoutMismatch,
    NoDecodeWorker,
    StaleIncarnation,
    TransferFailed,
    TransferTimeout,
    WorkerGone,
)
from headrace_common.telemetry import Telemetry
from headrace_kv.layout import WorkerRef
from headrace_router.attempt import Attempt, AttemptOutcome, Job
from headrace_router.placement import Candidates, Decision, Placement, PlacementRequest
from headrace_router.prefill_queue import PrefillQueue
from headrace_router.view import WorkerView

_LOG = logging.getLogger(__name__)

_SAME_WORKER_PAUSE_S = 0.1
_RETRY_TIME_MIN_S = 1.0

# The pair failed: its prefill worker is not asked again, its decode worker only if it is alone.
_PAIR_ERRORS = (TransferFailed, TransferTimeout, LayoutMismatch)
# The decode worker said that it will not take this request.
_DECODE_REFUSALS = (DecodeFull, Draining, StaleIncarnation)


class PolicySource(Protocol):
    """The run-time policy, as the registry's view has it."""

    @property
    def policy(self) -> registry_pb2.Policy:
        """The policy in force."""
        ...


@dataclass(slots=True)
class _Blame:
    """Who failed so far."""

    failed: set[WorkerRef] = field(default_factory=set)
    suspect: set[WorkerRef] = field(default_factory=set)
    prefill_side: bool = False
    last_error: HeadraceError | None = None

    def note(
        self, error: HeadraceError, attempt: Attempt, decode: WorkerRef, remaining_s: float
    ) -> bool:
        """Takes a failed attempt into account; False when no other attempt can help."""
        self.last_error = error
        if attempt.prefill_failed and not isinstance(error, InvalidRequest):
            self._blame_prefill(attempt)
            return True
        if isinstance(error, _PAIR_ERRORS):
            self._blame_prefill(attempt)
            self.suspect.add(decode)
            # An error that names the missing keys says more than the deadline of a hopeless retry.
            return not isinstance(error, TransferTimeout) or remaining_s > _RETRY_TIME_MIN_S
        if isinstance(error, _DECODE_REFUSALS):
            self.failed.add(decode)
            return True
        self.suspect.add(decode)
        return isinstance(error, WorkerGone)

    def _blame_prefill(self, attempt: Attempt) -> None:
        self.prefill_side = True
        if attempt.prefill_worker is not None:
            self.failed.add(attempt.prefill_worker)


class Generator:
    """Runs requests to their end. Holds no state of any one request."""

    def __init__(
        self,
        *,
        view: WorkerView,
        queue: PrefillQueue,
        placement: Placement,
        policy: PolicySource,
        retry_budget: int,
        telemetry: Telemetry,
    ) -> None:
        self._view = view
        self._queue = queue
        self._placement = placement
        self._policy = policy
        self._retry_budget = retry_budget
        self._telemetry = telemetry

    async def run(
        self,
        job: Job,
    ) -> None:
        """Fills and finishes the job's answer.

        Raises the last attempt's error when no other attempt may be made.
        """
        policy = self._policy.policy
        budget = policy.retry_budget if policy.HasField("retry_budget") else self._retry_budget
        blame = _Blame()
        for number in range(1, budget + 2):
            last = number == budget + 1
            decision = self._route(job, policy, blame, local_only=last and blame.prefill_side)
            if decision.worker.ref in blame.suspect:
                await asyncio.sleep(min(_SAME_WORKER_PAUSE_S, job.deadline.remaining_s()))
            promise = self._view.promise(decision.worker.ref)
            if promise is None:
                blame.failed.add(decision.worker.ref)
                continue
            attempt = Attempt(
                job,
                decision,
                number=number,
                avoid=frozenset(blame.failed),
                channel=promise.channel,
                queue=self._queue,
                telemetry=self._telemetry,
            )
            try:
                outcome = await attempt.run()
            except HeadraceError as error:
                retryable = blame.note(
                    error, attempt, decision.worker.ref, job.deadline.remaining_s()
                )
                _LOG.warning("attempt %d of %s: %s", number, job.request.request_id, error.detail)
                if job.answer.started or not retryable or last or job.deadline.expired:
                    raise
            else:
                self._finish(job, decision, attempt, outcome, number)
                return
            finally:
                promise.release()
        raise blame.last_error or _vanished(job.request.model)

    def _route(
        self,
        job: Job,
        policy: registry_pb2.Policy,
        blame: _Blame,
        *,
        local_only: bool,
    ) -> Decision:
        start_unix_ns = time.time_ns()
        request = job.request
        placement_request = PlacementRequest(
            model=request.model,
            prompt_tokens=len(request.token_ids),
            wish=request.placement,
            local_prefill_max_tokens=policy.local_prefill_max_tokens,
            failed=frozenset(blame.failed),
            suspect=frozenset(blame.suspect),
            local_only=local_only,
        )
        candidates = Candidates(self._view.loads(request.model), self._queue.candidates())
        problem = ""
        attributes: dict[str, str] = {}
        try:
            decision = self._placement.choose(placement_request, candidates)
            attributes = {
                schema.ATTRIBUTE_DECODE_WORKER_ID: decision.worker.ref.worker_id,
                schema.ATTRIBUTE_PLACEMENT: "remote" if decision.remote else "local",
                schema.ATTRIBUTE_EXPLANATION: decision.explanation,
            }
            return decision
        except NoDecodeWorker as error:
            problem = error.detail
            # What made the workers drop out says more than that none is left.
            raise blame.last_error or error from None
        finally:
            self._telemetry.record_span(
                schema.SPAN_ROUTE,
                trace.set_span_in_context(job.root),
                start_unix_ns,
                time.time_ns(),
                attributes,
                problem,
            )

    def _finish(
        self,
        job: Job,
        decision: Decision,
        attempt: Attempt,
        outcome: AttemptOutcome,
        number: int,
    ) -> None:
        answer, root, arrival_unix_ns = job.answer, job.root, job.arrival_unix_ns
        prefill_worker = attempt.prefill_worker
        now_unix_ns = time.time_ns()
        last_unix_ns = answer.last_token_unix_ns or now_unix_ns
        first_unix_ns = answer.first_token_unix_ns or now_unix_ns
        usage = inference_pb2.Usage(
            prompt_tokens=len(job.request.token_ids),
            completion_tokens=answer.completion_tokens,
            decode_cached_tokens=outcome.cached_tokens,
            transferred_tokens=outcome.transferred_tokens,
        )
        timing = inference_pb2.Timing(
            time_to_first_token=_duration(first_unix_ns - arrival_unix_ns),
            total=_duration(last_unix_ns - arrival_unix_ns),
            decode_worker_id=decision.worker.ref.worker_id,
            prefill_worker_id=prefill_worker.worker_id if prefill_worker else "",
            attempts=number,
        )
        answer.finish(outcome.reason, usage, timing)
        parent = trace.set_span_in_context(root)
        record = self._telemetry.record_span
        if answer.started:
            record(schema.SPAN_FIRST_TOKEN, parent, arrival_unix_ns, first_unix_ns)
            record(schema.SPAN_STREAM, parent, first_unix_ns, last_unix_ns)
        reason = sampling_pb2.FinishReason.Name(answer.finish_reason)
        root.set_attribute(schema.ATTRIBUTE_COMPLETION_TOKENS, answer.completion_tokens)
        root.set_attribute(
            schema.ATTRIBUTE_FINISH_REASON, reason.removeprefix("FINISH_REASON_").lower()
        )


def _duration(nanoseconds: int) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(max(0, nanoseconds))
    return duration


def _vanished(model: str) -> NoDecodeWorker:
    return NoDecodeWorker(
        f"every decode worker of {model} left meanwhile", metadata={"model": model}
    )
