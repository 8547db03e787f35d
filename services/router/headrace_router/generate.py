"""A request's attempts: place, try, and try elsewhere while the client has seen nothing."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from google.protobuf.duration_pb2 import Duration
from opentelemetry import trace
from opentelemetry.trace import Span

from headrace.inference.v1 import inference_pb2, sampling_pb2
from headrace.registry.v1 import registry_pb2
from headrace_common import telemetry_schema as schema
from headrace_common.deadlines import Deadline
from headrace_common.errors import (
    Cancelled,
    DecodeFull,
    Draining,
    HeadraceError,
    InvalidRequest,
    KvCorrupt,
    LayoutMismatch,
    NoDecodeWorker,
    ProtocolViolation,
    StaleIncarnation,
    TransferFailed,
    TransferTimeout,
    WorkerGone,
)
from headrace_common.telemetry import Telemetry
from headrace_common.tickets import TicketSigner
from headrace_kv.layout import WorkerRef, fingerprint
from headrace_router.attempt import Attempt, AttemptOutcome, Job
from headrace_router.first_token import made_by_prefill
from headrace_router.load_table import LoadTable, Numbers, Worker
from headrace_router.placement import (
    Candidates,
    Decision,
    Placement,
    PlacementRequest,
    RoutePolicy,
)
from headrace_router.prefill_queue import PrefillQueue
from headrace_router.queue_task import TaskTerms
from headrace_router.validate import PreparedRequest
from headrace_router.view import WorkerView

_LOG = logging.getLogger(__name__)

_SAME_WORKER_PAUSE_S = 0.1
_RETRY_TIME_MIN_S = 1.0

# The pair failed: its prefill worker is not asked again, its decode worker only if it is alone. Cancelled is a prefill
# worker's that ends before its task: a caller that goes away is heard here first.
_PAIR_ERRORS = (Cancelled, TransferFailed, TransferTimeout, LayoutMismatch, ProtocolViolation)
# The decode worker said that it will not take this request.
_DECODE_REFUSALS = (DecodeFull, Draining, StaleIncarnation)


class PrefixSource(Protocol):
    """Which worker holds how much of a prompt already."""

    def cached_tokens(self, table: LoadTable, token_ids: Sequence[int]) -> Numbers:
        """Prompt tokens that each worker of the table holds, slower tiers counted for less. Shape [worker]."""
        ...

    def cached_refs(
        self, model: str, token_ids: Sequence[int], refs: Collection[WorkerRef]
    ) -> dict[WorkerRef, int]:
        """The same of a few prefill workers; those that hold none are left out."""
        ...


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
        if attempt.prefill_failed and not isinstance(error, InvalidRequest | KvCorrupt):
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
        prefixes: PrefixSource,
        policy: PolicySource,
        retry_budget: int,
        signer: TicketSigner,
        telemetry: Telemetry,
    ) -> None:
        self._signer = signer
        self._view = view
        self._queue = queue
        self._placement = placement
        self._prefixes = prefixes
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
        budget = self._budget
        blame = _Blame()
        for number in range(1, budget + 2):
            last = number == budget + 1
            local_only = last and blame.prefill_side
            decision = self._route(job.request, job.root, job.deadline, blame, local_only)
            if decision.worker.ref in blame.suspect:
                await asyncio.sleep(min(_SAME_WORKER_PAUSE_S, job.deadline.remaining_s()))
            promise = self._view.promise(decision.worker.ref, len(job.request.token_ids))
            if promise is None:
                blame.failed.add(decision.worker.ref)
                continue
            attempt = Attempt(
                job,
                decision,
                number=number,
                first_by_prefill=made_by_prefill(
                    job.request, self._policy.policy, decision, len(job.answer.generated)
                ),
                terms=self.task_terms(
                    decision.worker,
                    job.request.token_ids if decision.remote else (),
                    job.deadline,
                    avoid=frozenset(blame.failed),
                    front=blame.prefill_side,
                ),
                channel=promise.channel,
                queue=self._queue,
                signer=self._signer,
                telemetry=self._telemetry,
            )
            try:
                outcome = await attempt.run()
            except HeadraceError as error:
                retryable = blame.note(
                    error, attempt, decision.worker.ref, job.deadline.remaining_s()
                )
                _LOG.warning("attempt %d of %s: %s", number, job.request.request_id, error.detail)
                if job.answer.final or not retryable or last or job.deadline.expired:
                    raise
            else:
                self._finish(job, decision, attempt, outcome, number)
                return
            finally:
                promise.release()
        raise blame.last_error or _vanished(job.request.model)

    @property
    def _budget(self) -> int:
        policy = self._policy.policy
        return policy.retry_budget if policy.HasField("retry_budget") else self._retry_budget

    def route(self, request: PreparedRequest, root: Span, deadline: Deadline) -> Decision:
        """Where the request would go now. Promises nothing to anybody. Raises NoDecodeWorker."""
        return self._route(request, root, deadline, _Blame(), local_only=False)

    def task_terms(
        self,
        worker: Worker,
        token_ids: Sequence[int],
        deadline: Deadline,
        *,
        avoid: frozenset[WorkerRef] = frozenset(),
        front: bool = False,
    ) -> TaskTerms:
        """What to ask of the prefill queue for a prompt that `worker` is to receive; no tokens for a local one."""
        cached: dict[WorkerRef, int] = {}
        if token_ids:
            refs = self._queue.partners().get(fingerprint(worker.layout), frozenset())
            cached = self._prefixes.cached_refs(worker.model, token_ids, refs)
        return TaskTerms(
            deadline_unix_s=deadline.unix_s,
            avoid=avoid | self._view.distrusted(worker.ref),
            cached=cached,
            returns_max=self._budget,
            front=front,
        )

    def _route(
        self,
        request: PreparedRequest,
        root: Span,
        deadline: Deadline,
        blame: _Blame,
        local_only: bool,
    ) -> Decision:
        start_unix_ns = time.time_ns()
        placement_request = PlacementRequest(
            model=request.model,
            prompt_tokens=len(request.token_ids),
            wish=request.placement,
            policy=RoutePolicy.from_proto(self._policy.policy),
            remaining_s=deadline.remaining_s(),
            failed=frozenset(blame.failed),
            suspect=frozenset(blame.suspect),
            local_only=local_only,
        )
        table = self._view.table(request.model)
        candidates = Candidates(
            decode=table,
            cached_tokens=self._prefixes.cached_tokens(table, request.token_ids),
            prefill=self._queue.partners(),
            queue_wait_s=self._queue.estimate(request.model).wait_s,
        )
        problem = ""
        attributes: dict[str, str] = {}
        try:
            decision = self._placement.choose(placement_request, candidates)
            attributes = {
                schema.ATTRIBUTE_DECODE_WORKER_ID: decision.worker.ref.worker_id,
                schema.ATTRIBUTE_PLACEMENT: "remote" if decision.remote else "local",
                schema.ATTRIBUTE_EXPLANATION: decision.explanation,
                schema.ATTRIBUTE_CANDIDATES: "; ".join(map(str, decision.candidates)),
            }
            return decision
        except NoDecodeWorker as error:
            problem = error.detail
            # What made the workers drop out says more than that none is left.
            raise blame.last_error or error from None
        finally:
            self._telemetry.record_span(
                schema.SPAN_ROUTE,
                trace.set_span_in_context(root),
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
            maker = "prefill" if answer.generated else "decode"
            root.set_attribute(schema.ATTRIBUTE_FIRST_TOKEN, maker)
        if answer.generated and answer.second_token_unix_ns:
            record(schema.SPAN_SECOND_TOKEN, parent, first_unix_ns, answer.second_token_unix_ns)
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
