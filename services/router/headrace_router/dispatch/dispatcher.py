"""A request's attempts: place, try, and go on elsewhere after the tokens that the client has."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from google.protobuf.duration_pb2 import Duration
from opentelemetry import trace
from opentelemetry.trace import Span

from headrace.inference.v1 import inference_pb2, sampling_pb2
from headrace.registry.v1 import registry_pb2
from headrace_common.deadlines import Deadline
from headrace_common.errors import DecodeFull, HeadraceError, NoDecodeWorker, WorkerGone
from headrace_common.rpc.tickets import TicketSigner
from headrace_common.telemetry import schema
from headrace_common.telemetry.setup import Telemetry
from headrace_kv.layout.compatibility import fingerprint
from headrace_kv.layout.layout import WorkerRef
from headrace_router.dispatch.attempt import Attempt, AttemptOutcome
from headrace_router.dispatch.first_token import BY_DECODE, MAKER_NAMES, first_token_maker
from headrace_router.dispatch.retry_policy import RetryState
from headrace_router.placement import (
    Candidates,
    Decision,
    Placement,
    PlacementRequest,
    RoutePolicy,
)
from headrace_router.prefill_queue.queue import PrefillQueue
from headrace_router.prefill_queue.task import TaskTerms
from headrace_router.request.request import RoutedRequest
from headrace_router.request.validation import PreparedRequest
from headrace_router.workers.connection import LoadReservation
from headrace_router.workers.directory import WorkerDirectory
from headrace_router.workers.table import LoadTable, Numbers, Worker

_LOG = logging.getLogger(__name__)

_SAME_WORKER_PAUSE_S = 0.1
_LOOK_S = 0.1


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


class RequestDispatcher:
    """Runs requests to their end. Holds no state of any one request."""

    def __init__(
        self,
        *,
        view: WorkerDirectory,
        queue: PrefillQueue,
        placement: Placement,
        prefixes: PrefixSource,
        policy: PolicySource,
        retry_budget: int,
        signer: TicketSigner,
        telemetry: Telemetry,
        migration_wait_s: float,
        on_migration: Callable[[str], None],
    ) -> None:
        """`on_migration` hears the reason each time that an answer which has begun needs another attempt."""
        self._migration_wait_s = migration_wait_s
        self._on_migration = on_migration
        self._signer = signer
        self._view = view
        self._queue = queue
        self._placement = placement
        self._prefixes = prefixes
        self._policy = policy
        self._retry_budget = retry_budget
        self._telemetry = telemetry

    async def run(self, job: RoutedRequest) -> None:
        """Fills and finishes the job's answer, from where it is.

        Raises the last attempt's error when no other attempt may be made.
        """
        blame = RetryState(self._budget, self._migration_wait_s)
        attempt: Attempt | None = None
        number = 0
        while not (reason := job.answer.ended_by):
            await self._before_an_attempt(job, blame, number)
            token_ids = job.request.token_ids + job.answer.generated
            decision = self._route(
                job.request, token_ids, job.root, job.deadline, blame, blame.local_only
            )
            promise = self._view.reserve_load(decision.worker.ref, len(token_ids))
            if promise is None:
                blame.failed.add(decision.worker.ref)
                continue
            if decision.worker.ref in blame.suspect:
                await asyncio.sleep(min(_SAME_WORKER_PAUSE_S, job.deadline.remaining_s()))
            number += 1
            attempt = self._attempt(job, decision, promise, number, token_ids, blame)
            try:
                outcome = await attempt.run()
            except HeadraceError as error:
                # Those that have no room say so often when they do.
                level = logging.DEBUG if isinstance(error, DecodeFull) else logging.WARNING
                _LOG.log(
                    level, "attempt %d of %s: %s", number, job.request.request_id, error.detail
                )
                error.metadata["attempts"] = str(number)
                self._judge(job, error, attempt, blame)
            else:
                self._finish(job, attempt, outcome, number)
                return
            finally:
                promise.release()
        # Its last token came, and then nothing that says so.
        outcome = AttemptOutcome(reason, 0, 0) if attempt is None else attempt.outcome_of(reason)
        self._finish(job, attempt, outcome, number)

    def _attempt(
        self,
        job: RoutedRequest,
        decision: Decision,
        promise: LoadReservation,
        number: int,
        token_ids: Sequence[int],
        blame: RetryState,
    ) -> Attempt:
        return Attempt(
            job,
            decision,
            number=number,
            first_token=first_token_maker(
                job.request, self._policy.policy, decision, len(job.answer.generated), number
            ),
            terms=self.task_terms(
                decision.worker,
                token_ids if decision.remote else (),
                job.deadline,
                avoid=frozenset(blame.failed),
                front=blame.prefill_side or bool(job.answer.generated),
            ),
            channel=promise.channel,
            queue=self._queue,
            signer=self._signer,
            telemetry=self._telemetry,
        )

    def _judge(
        self, job: RoutedRequest, error: HeadraceError, attempt: Attempt, blame: RetryState
    ) -> None:
        """Returns when another attempt may be made, or none is needed. Raises `error` when none may be."""
        if isinstance(error, WorkerGone) and "grpc_code" in error.metadata:
            self._view.mark_unreachable(attempt.decode_worker)
        retryable = blame.note(
            error,
            attempt,
            begun=bool(job.answer.generated),
            remaining_s=job.deadline.remaining_s(),
        )
        if job.answer.ended_by:
            return
        if not retryable:
            raise error
        if job.answer.generated:
            self._on_migration(error.reason)

    async def _before_an_attempt(self, job: RoutedRequest, blame: RetryState, number: int) -> None:
        """Waits for a decode worker that answers, rather than spend attempts on dead ones; longer for a begun answer.

        Whoever answers when it returns still does in `_route`, unless something is awaited in between.
        """
        blame.forget_full()
        if not number or not job.answer.generated:
            await self._view.wait_for_worker(job.request.model, job.deadline)
            return
        give_up = Deadline.after(min(blame.wait_left_s, job.deadline.remaining_s()))
        while not give_up.expired:
            table = self._view.table(job.request.model)
            excluded = table.draining | table.flags(blame.excluded)
            if (table.reachable & ~excluded).any():
                return
            await asyncio.sleep(_LOOK_S)
            blame.forget_full()

    @property
    def _budget(self) -> int:
        policy = self._policy.policy
        return policy.retry_budget if policy.HasField("retry_budget") else self._retry_budget

    def route(
        self,
        request: PreparedRequest,
        root: Span,
        deadline: Deadline,
        avoid: Collection[str] = (),
    ) -> Decision:
        """Where the request would go now. Promises nothing to anybody. Raises NoDecodeWorker.

        Workers named in `avoid` come after all others.
        """
        workers = self._view.table(request.model).workers
        suspect = {worker.ref for worker in workers if worker.ref.worker_id in avoid}
        token_ids = request.token_ids + request.generated
        blame = RetryState(self._budget, self._migration_wait_s, suspect=suspect)
        return self._route(request, token_ids, root, deadline, blame, local_only=False)

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
            refs = self._queue.pulling_workers().get(fingerprint(worker.layout), frozenset())
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
        token_ids: Sequence[int],
        root: Span,
        deadline: Deadline,
        blame: RetryState,
        local_only: bool,
    ) -> Decision:
        start_unix_ns = time.time_ns()
        placement_request = PlacementRequest(
            model=request.model,
            prompt_tokens=len(token_ids),
            prefill_placement=request.placement,
            policy=RoutePolicy.from_proto(self._policy.policy),
            remaining_s=deadline.remaining_s(),
            failed=blame.excluded,
            suspect=frozenset(blame.suspect),
            local_only=local_only,
        )
        table = self._view.table(request.model)
        candidates = Candidates(
            decode=table,
            cached_tokens=self._prefixes.cached_tokens(table, token_ids),
            prefill=self._queue.pulling_workers(),
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
        job: RoutedRequest,
        attempt: Attempt | None,
        outcome: AttemptOutcome,
        number: int,
    ) -> None:
        answer, root, arrival_unix_ns = job.answer, job.root, job.arrival_unix_ns
        prefill_worker = attempt.prefill_worker if attempt is not None else None
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
            decode_worker_id=attempt.decode_worker.worker_id if attempt is not None else "",
            prefill_worker_id=prefill_worker.worker_id if prefill_worker else "",
            attempts=number,
        )
        answer.finish(outcome.reason, usage, timing)
        parent = trace.set_span_in_context(root)
        record = self._telemetry.record_span
        if answer.started:
            record(schema.SPAN_FIRST_TOKEN, parent, arrival_unix_ns, first_unix_ns)
            record(schema.SPAN_STREAM, parent, first_unix_ns, last_unix_ns)
            root.set_attribute(schema.ATTRIBUTE_FIRST_TOKEN, MAKER_NAMES[answer.first_token_by])
        if answer.first_token_by != BY_DECODE and answer.second_token_unix_ns:
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
