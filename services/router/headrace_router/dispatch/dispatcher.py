"""Runs a request: chooses workers and makes attempts. Each attempt continues after the tokens that the client has."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from array import array
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from headrace.inference.v1 import first_token_pb2, inference_pb2
from headrace.registry.v1 import registry_pb2
from headrace_common.deadlines import Deadline
from headrace_common.durations import seconds_from_duration
from headrace_common.errors import DecodeFull, HeadraceError, NoDecodeWorker, QueueFull, WorkerGone
from headrace_frontend.request.validation import PreparedRequest
from headrace_frontend.running.attempt import AdmittedRequest, AttemptOutcome, finish_response
from headrace_frontend.running.record import RequestRecord, now_us
from headrace_kv.compatibility import fingerprint
from headrace_kv.layout import WorkerRef
from headrace_router.costs import Candidates, TokenTargets
from headrace_router.dispatch.attempt import Attempt
from headrace_router.dispatch.messages import BY_DECODE, first_token_maker
from headrace_router.dispatch.messages import Policy as FirstTokenMaker
from headrace_router.dispatch.prefix_fetch import PrefixFetches
from headrace_router.dispatch.retry_policy import TAKEN_SLOT_PAUSE_S, RetryState
from headrace_router.placement import (
    AnswerLengths,
    Decision,
    Placement,
    PlacementRequest,
    RoutePolicy,
)
from headrace_router.prefill_queue.queue import PrefillQueue
from headrace_router.prefill_queue.task import TaskTerms
from headrace_router.prefix_cache.cached_prompts import CachedPrompts
from headrace_router.tracing.attempt_record import Move, RoutedAttempt, WorkerClocks
from headrace_router.workers.connection import LoadReservation
from headrace_router.workers.directory import WorkerDirectory
from headrace_router.workers.table import Numbers, Worker
from headrace_router.workers.under_way import PromptUnderWay

_LOG = logging.getLogger(__name__)

_AVOIDED_WORKER_PAUSE_S = 0.1
# Retries of a request where the policy sets none.
_RETRY_BUDGET = 2
_POLL_INTERVAL_S = 0.1


PolicySource: TypeAlias = Callable[[], registry_pb2.Policy]
"""Returns the run-time policy in force."""


class RunningAttempts(dict[int, Attempt]):
    """The attempts that lead, by the identity of their request."""

    def __init__(self) -> None:
        super().__init__()
        self._of_worker: dict[WorkerRef, dict[int, Attempt]] = {}

    def __setitem__(self, name: int, attempt: Attempt) -> None:
        if name in self:
            del self[name]
        super().__setitem__(name, attempt)
        self._of_worker.setdefault(attempt.decode_worker, {})[name] = attempt

    def __delitem__(self, name: int) -> None:
        worker = self.pop(name).decode_worker
        del self._of_worker[worker][name]
        if not self._of_worker[worker]:
            del self._of_worker[worker]

    def of_worker(self, worker: WorkerRef) -> Collection[Attempt]:
        """Those on a decode worker. Costs no look at the others."""
        return self._of_worker.get(worker, {}).values()


@dataclass(eq=False, slots=True)
class RequestDispatcher:
    """Runs requests to their end. Has no state of a single request."""

    workers: WorkerDirectory
    queue: PrefillQueue
    placement: Placement
    prefixes: CachedPrompts
    policy: PolicySource
    ticket_key_id: bytes
    migration_wait_s: float
    on_migration: Callable[[str], None]
    """Gets the error's reason each time that a response that has started needs another attempt."""
    clocks: WorkerClocks
    fetches: PrefixFetches
    check_placed: Callable[[AdmittedRequest, Decision], None] = lambda request, decision: None
    """May raise an error by the first placement of a request."""
    running: RunningAttempts = field(default_factory=RunningAttempts, init=False)
    _lengths: AnswerLengths = field(default_factory=AnswerLengths, init=False)

    async def run(self, request: AdmittedRequest) -> None:
        """Fills and finishes the response, from the tokens that it has.

        Raises the last attempt's error when no other attempt may be made.
        """
        retries = RetryState(self._budget, self.migration_wait_s)
        attempt: Attempt | None = None
        number = 0
        outcome: AttemptOutcome | None = None
        prepared, response = request.prepared, request.response
        while outcome is None and not response.ended_by:
            await self._wait_for_worker(request, retries, number)
            record = self._new_record(request.record, number + 1)
            token_ids, generated = request.prefix_ids, response.completion_tokens
            decision, targets, maker = self._route(
                prepared, token_ids, request.record, record, request.deadline, retries
            )
            if attempt is None:
                self.check_placed(request, decision)
            worker = decision.worker.ref
            load_reservation = self.workers.reserve_load(worker, len(token_ids))
            if load_reservation is None:
                retries.exclude_worker(worker)
                continue
            # The queue chooses the worker that computes the prompt, where none is planned.
            unplanned = decision.remote and decision.prefill is None
            on_computed = self.workers.expect_prompt(
                PromptUnderWay(
                    decision.prefill or worker,
                    token_ids[: decision.computes_from or None],
                    prepared.cache_salt,
                ),
                0 if unplanned else decision.prefill_tokens,
                decision.cached_tokens,
            )
            try:
                if worker in retries.avoided:
                    pause_s = min(_AVOIDED_WORKER_PAUSE_S, request.deadline.remaining_s())
                    await asyncio.sleep(pause_s)
                number += 1
                if number == 1 and not generated:
                    load = load_reservation
                    await self.fetches.fetch(request, token_ids, decision, load, record)
                terms = self._terms(request, token_ids, decision, retries)
                attempt = Attempt(
                    self.queue,
                    request,
                    record,
                    decision=decision,
                    load=load_reservation,
                    terms=terms,
                    ticket_key_id=self.ticket_key_id,
                    first_token=maker
                    if decision.remote and not decision.computes_from
                    else BY_DECODE,
                    bounds=targets.bounds(started=generated > 0),
                    on_computed=on_computed,
                )
                attempt.lead()
                outcome = await self._outcome_of(request, attempt, number, retries)
            finally:
                on_computed()
                load_reservation.release()
        if outcome is None:
            # The response is complete, but no attempt reported Finished.
            reason = response.ended_by
            outcome = attempt.outcome_of(reason) if attempt else AttemptOutcome(reason)
        self._lengths.ended(prepared.model, response.completion_tokens)
        prefill = attempt.prefill_worker if attempt is not None else None
        await finish_response(
            request,
            outcome,
            attempts=number,
            prefill_worker_id=prefill.worker_id if prefill is not None else "",
        )

    def route(
        self,
        request: PreparedRequest,
        record: RequestRecord,
        deadline: Deadline,
        avoid: Collection[str] = (),
    ) -> Decision:
        """The placement of the request at this moment. Reserves nothing. Raises NoDecodeWorker.

        Workers named in `avoid` are chosen only when no other is left.
        """
        workers = self.workers.table(request.model).workers if avoid else ()
        avoided = {worker.ref for worker in workers if worker.ref.worker_id in avoid}
        retries = RetryState(self._budget, self.migration_wait_s, avoided=avoided)
        token_ids = request.prefix_ids + array("I", request.generated)
        attempt = self._new_record(record, 1)
        return self._route(request, token_ids, record, attempt, deadline, retries)[0]

    def task_terms(
        self, worker: Worker, token_ids: array[int], cache_salt: str, asked: TaskTerms
    ) -> TaskTerms:
        """`asked`, with what follows from the prompt and from decode worker `worker`."""
        refs = self.queue.workers.pulling().get(fingerprint(worker.layout), frozenset())
        return replace(
            asked,
            # A worker of both roles has no KV to hand over to itself.
            avoid=asked.avoid.union(self.workers.distrusted(worker.ref), (worker.ref,)),
            cached=self.prefixes.cached_refs(worker.model, token_ids, cache_salt, refs),
            returns_max=self._budget,
        )

    def _new_record(self, request: RequestRecord, number: int) -> RoutedAttempt:
        record = RoutedAttempt(now_us(), worker_clocks=self.clocks, number=number)
        request.attempts.append(record)
        return record

    @property
    def _budget(self) -> int:
        policy = self.policy()
        return policy.retry_budget if policy.HasField("retry_budget") else _RETRY_BUDGET

    async def _wait_for_worker(
        self, request: AdmittedRequest, retries: RetryState, attempts: int
    ) -> None:
        """Waits for a reachable decode worker, rather than spend retries on dead ones.

        A response that has started waits longer. A worker that is reachable when this returns is still reachable in
        `_route`, because nothing is awaited in between.
        """
        retries.readmit_full_workers()
        continues = bool(attempts and request.response.completion_tokens)
        if continues:
            limit_s, pause_s = retries.wait_left_s, _POLL_INTERVAL_S
        else:
            await self.workers.wait_for_worker(request.prepared.model, request.deadline)
            if not retries.full:
                return
            # Every worker that could serve the request may have had no free slot just now.
            limit_s, pause_s = math.inf, TAKEN_SLOT_PAUSE_S
        give_up = Deadline.after(min(limit_s, request.deadline.remaining_s()))
        while (continues or retries.full) and not give_up.expired:
            if self._available(request.prepared, retries):
                return
            if retries.needs_blocks and not continues:
                try:
                    await request.wait_for_room()
                except QueueFull as error:
                    # The worker's error has the numbers of blocks.
                    raise retries.last_error or error from None
                retries.readmit_full_workers(math.inf)
                return
            await asyncio.sleep(min(pause_s, give_up.remaining_s()))
            retries.readmit_full_workers()

    def _available(self, request: PreparedRequest, retries: RetryState) -> bool:
        """Whether a reachable worker serves the request that no failure excludes."""
        table = self.workers.table(request.model)
        excluded = table.draining | table.flags(retries.excluded)
        return bool((table.reachable & table.serving(request.adapter) & ~excluded).any())

    def _route(
        self,
        request: PreparedRequest,
        token_ids: array[int],
        record: RequestRecord,
        attempt: RoutedAttempt,
        deadline: Deadline,
        retries: RetryState,
    ) -> tuple[Decision, TokenTargets, FirstTokenMaker]:
        """The placement of an attempt, with its targets, and the maker of its first token if the prefill is remote."""
        policy = self.policy()
        targets = self._targets(request, policy, record.arrival_ns)
        generated = len(token_ids) - len(request.token_ids)
        maker = first_token_maker(request, policy, generated, attempt.number)
        candidates = self._candidates(request, token_ids)
        asked = PlacementRequest(
            model=request.model,
            prompt_tokens=len(token_ids),
            prefill_placement=request.placement,
            policy=RoutePolicy.from_proto(policy),
            remaining_s=deadline.remaining_s(),
            failed=retries.excluded,
            suspect=retries.avoided,
            local_only=retries.local_only,
            adapter=request.adapter,
            targets=targets,
            early_first=maker != BY_DECODE,
            may_divide=_may_divide(request, retries)
            and request.placement == inference_pb2.PREFILL_PLACEMENT_UNSPECIFIED
            # The worker that generates makes the first token.
            and request.first_token in (first_token_pb2.FIRST_TOKEN_POLICY_UNSPECIFIED, BY_DECODE),
        )
        try:
            decision = self.placement.choose(asked, candidates)
        except NoDecodeWorker as error:
            attempt.not_routed(error)
            # The failure that excluded the workers is more precise than NoDecodeWorker.
            raise retries.last_error or error from None
        if decision.remote:
            decision = decision.without_distrusted(
                candidates.prefill.get(fingerprint(decision.worker.layout), frozenset()),
                self.workers.distrusted(decision.worker.ref),
            )
        attempt.routed(decision)
        if isinstance(retries.last_error, DecodeFull) and not decision.reachable:
            # The full workers have stated when to ask again. The error of an unreachable worker would hide that.
            raise retries.last_error
        return decision, targets, maker

    def _targets(
        self, request: PreparedRequest, policy: registry_pb2.Policy, arrival_ns: int
    ) -> TokenTargets:
        """The request's own targets, else those of the policy."""
        ttft_s, tpot_s = request.ttft_target_s, request.tpot_target_s
        if ttft_s is None and policy.HasField("ttft_target"):
            ttft_s = seconds_from_duration(policy.ttft_target)
        if tpot_s is None and policy.HasField("tpot_target"):
            tpot_s = seconds_from_duration(policy.tpot_target)
        return TokenTargets(
            ttft_s,
            tpot_s,
            elapsed_s=1e-9 * (time.monotonic_ns() - arrival_ns),
            answer_tokens=self._lengths.expected(request.model, request.sampling.max_tokens),
        )

    def _candidates(self, request: PreparedRequest, token_ids: array[int]) -> Candidates:
        table = self.workers.table(request.model)
        cached_tokens: Numbers | None = None
        if not request.sampling.HasField("prompt_logprobs"):
            salt = request.cache_salt
            cached_tokens = self.workers.under_way.credited(
                self.prefixes.cached_tokens(table, token_ids, salt), table, token_ids, salt
            )
        if cached_tokens is not None and request.cached_on is not None:
            cached_tokens = table.with_cached_prompt(
                cached_tokens, request.cached_on, len(request.token_ids)
            )
        pulling = self.queue.workers.pulling(request.adapter)
        return Candidates(
            decode=table,
            cached_tokens=cached_tokens,
            prefill=pulling,
            queue_wait_s=self.queue.wait_s(request.model, request.priority, request.tenant),
            pairs=self.queue.pairs.costs(table, pulling),
            prefill_times=self.queue.mean_times(request.model),
        )

    def _terms(
        self,
        request: AdmittedRequest,
        token_ids: array[int],
        decision: Decision,
        retries: RetryState,
    ) -> TaskTerms | None:
        """Those of the prefill task. None for a local prefill."""
        if not decision.remote:
            return None
        prepared = request.prepared
        asked = TaskTerms(
            request.deadline.monotonic_s,
            retries.failed,
            front=retries.prefill_excluded or request.response.completion_tokens > 0,
            priority=prepared.priority,
            tenant=prepared.tenant,
            planned=decision.prefill,
            images=request.prepared.images,
            divide_gain=self.policy().divide_gain if _may_divide(prepared, retries) else 0.0,
        )
        return self.task_terms(decision.worker, token_ids, prepared.cache_salt, asked)

    async def _outcome_of(
        self, request: AdmittedRequest, attempt: Attempt, number: int, retries: RetryState
    ) -> AttemptOutcome | None:
        """The outcome, or None after a failure if another attempt may be made or the response is complete.

        Raises the attempt's error otherwise.
        """
        self.running[id(request)] = attempt
        try:
            first = outcome = await attempt.ended
            while attempt.successor is not None:
                attempt = attempt.successor
                outcome = await attempt.ended
            if outcome is not first:
                # The client pays for the prompt as it was computed first.
                cached, sent = first.cached_tokens, first.transferred_tokens
                outcome = replace(outcome, cached_tokens=cached, transferred_tokens=sent)
            return outcome
        except HeadraceError as error:
            # DecodeFull is frequent. The log bounds the lines about a lost worker, which fails all its requests.
            level = logging.DEBUG if isinstance(error, DecodeFull) else logging.WARNING
            line = (attempt.decode_worker, number, request.prepared.request_id, error.detail)
            _LOG.log(level, "%s: attempt %d of %s: %s", *line)
            error.add_metadata(attempts=str(number))
            gone = error.metadata.get("worker_id") if isinstance(error, WorkerGone) else None
            if gone == attempt.decode_worker.worker_id:
                self.workers.mark_unreachable(attempt.decode_worker)
            may_retry = retries.record_failure(
                await attempt.failure(error),
                client_has_tokens=request.response.completion_tokens > 0,
                time_left_s=request.deadline.remaining_s(),
                slot_wait_s=request.permit.slot_wait_s,
            )
            if request.response.ended_by:
                return None
            if not may_retry:
                raise
            if request.response.completion_tokens:
                self.on_migration(error.reason)
            return None
        finally:
            attempt.close()
            del self.running[id(request)]

    def place_beside(self, attempt: Attempt, worker_id: str = "") -> Decision:
        """Another decode worker for the rest of an answer, the named one if one is named.

        Raises NoDecodeWorker, or DecodeFull when none has a place.
        """
        request, own = attempt.request, attempt.decode_worker
        prepared, policy = request.prepared, self.policy()
        workers = self.workers.table(prepared.model).workers
        others = (one.ref for one in workers if worker_id not in ("", one.ref.worker_id))
        asked = PlacementRequest(
            model=prepared.model,
            prompt_tokens=len(request.prefix_ids),
            prefill_placement=prepared.placement,
            policy=RoutePolicy.from_proto(policy),
            remaining_s=request.deadline.remaining_s(),
            failed=frozenset((own, *others)),
            local_only=True,
            adapter=prepared.adapter,
            targets=self._targets(prepared, policy, request.record.arrival_ns),
        )
        decision = self.placement.choose(asked, self._candidates(prepared, request.prefix_ids))
        if unfit := decision.candidates[0].unfit:
            raise DecodeFull(f"{decision.worker.ref.worker_id} takes no answer: it is {unfit}")
        return decision

    def continue_on(
        self,
        source: Attempt,
        decision: Decision,
        load: LoadReservation,
        moved: asyncio.Future[Move],
        move: Move,
    ) -> Attempt:
        """An attempt that leads in place of `source` once it has a token, unless that has ended.

        `moved` gets `move` with its times then.
        """
        request = source.request
        number = len(request.record.attempts) + 1
        record = RoutedAttempt(now_us(), worker_clocks=self.clocks, number=number, moved=moved)
        record.routed(decision)
        # Until it leads, the answer's present attempt has the cost.
        record.report_late(source.record.charge)

        def take_over() -> None:
            source.move_to(target)
            record.report_late(lambda receipt: None)
            now_ns = time.monotonic_ns()
            gap_ns = now_ns - request.response.last_token_ns
            moved.set_result(move._replace(end_ns=now_ns, gap_ns=gap_ns))
            request.record.attempts.append(record)
            self.running[id(request)] = target

        targets = self._targets(request.prepared, self.policy(), request.record.arrival_ns)
        target = Attempt(
            self.queue,
            request,
            record,
            decision=decision,
            load=load,
            terms=None,
            ticket_key_id=self.ticket_key_id,
            bounds=targets.bounds(started=True),
        )
        target.lead_after(take_over)
        return target


def _may_divide(request: PreparedRequest, retries: RetryState) -> bool:
    """Whether two workers may compute the prompt, in the first attempt. An image must not be divided."""
    return retries.last_error is None and not (request.images or request.generated)
