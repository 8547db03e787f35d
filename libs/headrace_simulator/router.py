"""The router's decisions in a simulation: its placement, its prefix index and its queue, without connections."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from random import Random
from typing import Final

from headrace.inference.v1 import inference_pb2
from headrace.prefill.v1 import prefill_pb2
from headrace_common.callers.priority import Priority
from headrace_common.deadlines import Deadline
from headrace_common.errors import DecodeFull, HeadraceError, NoDecodeWorker
from headrace_frontend.admission.admission import Admission, AdmissionLimits
from headrace_kv.compatibility import fingerprint
from headrace_kv.layout import KvLayout, WorkerRef
from headrace_kv.prefix.hashing import prefix_hasher
from headrace_planner.settings import WorkerProfile
from headrace_router.costs import Candidates, TokenTargets
from headrace_router.early_refusal import (
    REQUEST_TARGET,
    FirstTokenBound,
    is_late,
    predicted,
    refusal,
)
from headrace_router.placement import (
    AnswerLengths,
    Decision,
    KvAware,
    Placement,
    PlacementRequest,
    RoutePolicy,
)
from headrace_router.prefill_queue.queue import PrefillQueue
from headrace_router.prefill_queue.task import TaskTerms
from headrace_router.prefix_cache.cached_prompts import CachedPrompts, TierPrices
from headrace_router.prefix_cache.index import PrefixIndex
from headrace_router.workers.table import LoadTable
from headrace_simulator.job import Job
from headrace_simulator.settings import SimulationSettings, Way
from headrace_simulator.trace import BLOCK_TOKENS, TraceRequest
from headrace_simulator.workers import SimulatedWorker

MODEL: Final = "simulated"
_HASH_KEY: Final = 1
_TENANT: Final = ""
_REQUESTS_MAX: Final = 1_000_000
# No request has a deadline in a simulation.
_REMAINING_S: Final = 1e9
_CACHED_SHARE: Final = 0.3
"""The default of vllm-router's cache_aware."""
_AWARE: Final = (Way.KV_AWARE, Way.KV_AWARE_TIERS, Way.PLAIN)


class RoundRobin(Placement):
    """Takes the next decode worker that has not refused the request. Otherwise as KvAware."""

    def __init__(self, inner: Placement) -> None:
        self._inner = inner
        self._turns = itertools.count()

    def choose(self, request: PlacementRequest, candidates: Candidates) -> Decision:
        table = candidates.decode
        rows = [
            row
            for row, (worker, draining) in enumerate(
                zip(table.workers, table.draining, strict=True)
            )
            if worker.ref not in request.failed and not draining
        ]
        if not rows:
            raise NoDecodeWorker("every decode worker refused")
        chosen = self._choose_row(rows, request, candidates)
        others = frozenset(one.ref for row, one in enumerate(table.workers) if row != chosen)
        return self._inner.choose(replace(request, failed=request.failed | others), candidates)

    def _choose_row(
        self, rows: list[int], request: PlacementRequest, candidates: Candidates
    ) -> int:
        return rows[next(self._turns) % len(rows)]


class CacheOrLoad(RoundRobin):
    """As balancers of plain engines: the one with most of the prompt cached, or else with the fewest requests."""

    def _choose_row(
        self, rows: list[int], request: PlacementRequest, candidates: Candidates
    ) -> int:
        cached, requests = candidates.cached_tokens, candidates.decode.requests
        idlest = min(rows, key=lambda row: requests[row])
        if cached is None:
            return idlest
        best = max(rows, key=lambda row: (cached[row], -requests[row]))
        return best if cached[best] > _CACHED_SHARE * request.prompt_tokens else idlest


class SimulatedRouter:
    """Serves one model. `jobs` has the jobs that are under way, by transfer id."""

    def __init__(
        self,
        settings: SimulationSettings,
        profile: WorkerProfile,
        wrap: Callable[[Placement], Placement] = lambda placement: placement,
    ) -> None:
        """`wrap` makes the placement from that of the settings."""
        self.queue = PrefillQueue(_REQUESTS_MAX, sign=lambda task, ref, layout_hash: b"")
        self.jobs: dict[str, Job] = {}
        self._loop = asyncio.get_running_loop()
        self.layout = KvLayout.attention(
            model=MODEL,
            dtype="bfloat16",
            layer_count=1,
            kv_head_count=1,
            block_tokens=BLOCK_TOKENS,
            parts={"kv": max(1, profile.kv_bytes_per_token)},
        )
        self._profile = profile
        self._settings = settings
        self._lengths = AnswerLengths()
        self._is_aware = settings.way in _AWARE
        aware = KvAware(Random(settings.seed))
        balancers = {Way.ROUND_ROBIN: RoundRobin, Way.PLAIN: CacheOrLoad}
        balancer = balancers.get(settings.way)
        self._placement = wrap(balancer(aware) if balancer is not None else aware)
        self._prefill_placement = inference_pb2.PREFILL_PLACEMENT_UNSPECIFIED
        if settings.way is Way.PLAIN:
            self._prefill_placement = inference_pb2.PREFILL_PLACEMENT_LOCAL
        self._policy = RoutePolicy(local_prefill_max_tokens=settings.local_prefill_max_tokens)
        self._cached = CachedPrompts(lambda: _HASH_KEY, TierPrices(self.queue.compute_s_per_token))
        self._hasher = prefix_hasher(_HASH_KEY, MODEL, BLOCK_TOKENS)
        self._workers: dict[WorkerRef, SimulatedWorker] = {}
        self._table = LoadTable(())
        limits = AdmissionLimits(_REQUESTS_MAX, _REQUESTS_MAX, wait_s=_REMAINING_S)
        self._admission = Admission(limits, dict)
        # Of the requests with a slot, the oldest of each class waits for blocks, and the others for it. When the load
        # changes, the highest class tries first. Admission of the decode workers keeps the shares of the others.
        self._turns = {priority: asyncio.Lock() for priority in Priority}
        self._load_changes = {priority: asyncio.Event() for priority in Priority}
        self._without_blocks = 0

    @property
    def index(self) -> PrefixIndex:
        """The index of cached prefixes."""
        return self._cached.model_index(MODEL, BLOCK_TOKENS).index

    @property
    def waiting_requests(self) -> int:
        """Requests that no decode worker has room for."""
        return self._admission.waiting + self._without_blocks

    def new_job(self, request: TraceRequest) -> Job:
        """The job of a request that arrives now."""
        words = request.token_words()
        return Job(request, words, self._hasher.hashes(words))

    def set_workers(self, workers: Iterable[SimulatedWorker]) -> None:
        """Replaces the workers that generate, those that drain included."""
        self._workers = {one.worker.ref: one for one in workers}
        self._table = LoadTable(one.worker for one in self._workers.values())
        for ref, one in self._workers.items():
            self._table.set(ref, one.load())
        self._admission.resize_slots(MODEL, self._table.slots(routers=1).total)
        self._load_changed()

    def update_load(self, worker: SimulatedWorker) -> None:
        """The load of a worker that generates has changed."""
        self._update_table(worker)
        self._load_changed()

    def _update_table(self, worker: SimulatedWorker) -> None:
        if worker.worker.ref in self._table:
            self._table.set(worker.worker.ref, worker.load())

    def _load_changed(self) -> None:
        for change in self._load_changes.values():
            change.set()

    async def serve(self, job: Job) -> None:
        """Runs a request to its end. Raises HeadraceError when it can never fit."""
        self.jobs[job.transfer_id] = job
        try:
            deadline = Deadline.after(_REMAINING_S)
            permit = await self._admission.admit(_TENANT, deadline, job.priority)
            with closing(permit):
                await permit.acquire_slot(MODEL)
                await self._serve(job)
        finally:
            del self.jobs[job.transfer_id]

    async def _serve(self, job: Job) -> None:
        decision, worker, cached_tokens = await self._reserve(job)
        holder = worker if decision.prefill is None else self._workers.get(decision.prefill)
        try:
            with self._counted(holder, decision):
                await self._prefill(job, decision, worker, cached_tokens)
        except HeadraceError:
            worker.release(job)
            raise
        if decision.remote:
            # Where the prompt is computed, by the default of the first-token policy.
            job.made_first_token(self._loop.time())
            tokens = job.prompt_tokens - 1 - cached_tokens
            await asyncio.sleep(self._profile.handover_s(tokens) if tokens else 0.0)
            worker.generate(job)
        await job.finished
        self._lengths.ended(MODEL, job.answer_tokens)

    @contextmanager
    def _counted(self, worker: SimulatedWorker | None, decision: Decision) -> Iterator[None]:
        """The prompt counts as work of the worker that should compute it."""
        if worker is None:
            yield
            return
        number = worker.prompts.add(
            decision.missing_tokens, self._loop.time(), decision.cached_tokens
        )
        self._update_table(worker)
        try:
            yield
        finally:
            worker.prompts.remove(number, self._loop.time())
            self._update_table(worker)

    async def _reserve(self, job: Job) -> tuple[Decision, SimulatedWorker, int]:
        """The decision, its worker, and the prompt tokens that the worker has cached. Waits for room."""
        self._without_blocks += 1
        try:
            async with self._turns[job.priority]:
                while (reservation := self._try_workers(job)) is None:
                    self._load_changes[job.priority].clear()
                    await self._load_changes[job.priority].wait()
                return reservation
        finally:
            self._without_blocks -= 1

    def _try_workers(self, job: Job) -> tuple[Decision, SimulatedWorker, int] | None:
        refused: frozenset[WorkerRef] = frozenset()
        while True:
            try:
                decision = self._placement.choose(
                    self._placement_request(job, refused), self._candidates(job)
                )
            except NoDecodeWorker:
                return None
            worker = self._workers[decision.worker.ref]
            if not refused:
                self._refuse_late(job, decision, worker)
            try:
                cached_tokens = worker.reserve(job)
            except DecodeFull:
                refused |= {decision.worker.ref}
                continue
            return decision, worker, cached_tokens

    def _refuse_late(self, job: Job, decision: Decision, worker: SimulatedWorker) -> None:
        """Raises FirstTokenLate as a router does among workers of both roles."""
        if not self._settings.early_refusal or decision.first_s is None:
            return
        elapsed_s = self._loop.time() - job.arrival_s
        prediction = predicted(elapsed_s, decision, decision.first_s, worker.load().times)
        bound = FirstTokenBound(self._settings.ttft_s, REQUEST_TARGET)
        if is_late(prediction, bound):
            raise refusal(prediction, bound)

    def _placement_request(self, job: Job, refused: frozenset[WorkerRef]) -> PlacementRequest:
        return PlacementRequest(
            model=MODEL,
            prompt_tokens=job.prompt_tokens,
            prefill_placement=self._prefill_placement,
            policy=self._policy,
            remaining_s=_REMAINING_S,
            failed=refused,
            targets=TokenTargets(
                self._settings.ttft_s if self._settings.have_targets else None,
                self._settings.itl_s if self._settings.have_targets else None,
                elapsed_s=self._loop.time() - job.arrival_s,
                answer_tokens=self._lengths.expected(MODEL, job.answer_tokens),
            ),
            early_first=True,
        )

    def _candidates(self, job: Job) -> Candidates:
        cached = None
        if self._is_aware:
            cached = self._cached.cached_tokens(self._table, job.token_words, "")
        return Candidates(
            decode=self._table,
            cached_tokens=cached,
            prefill=self.queue.workers.pulling(),
            queue_wait_s=self.queue.wait_s(MODEL, job.priority),
            prefill_times=self.queue.mean_times(MODEL),
        )

    async def _prefill(
        self, job: Job, decision: Decision, worker: SimulatedWorker, cached_tokens: int
    ) -> None:
        """Has the prompt computed."""
        if not decision.remote:
            computed: asyncio.Future[None] = self._loop.create_future()
            worker.compute(job, partial(computed.set_result, None), answered=True)
            await computed
            return
        task = prefill_pb2.PrefillTask(
            transfer_id=job.transfer_id,
            token_ids=[0] * (job.prompt_tokens - 1),
            start_token=cached_tokens,
            decode_worker_id=worker.worker.ref.worker_id,
            decode_incarnation=worker.worker.ref.incarnation,
        )
        terms = TaskTerms(
            deadline_s=job.arrival_s + _REMAINING_S,
            avoid=frozenset({worker.worker.ref}),
            cached=self._prefixes(job),
            returns_max=1_000,
            priority=job.priority,
            planned=decision.prefill,
        )
        queued = self.queue.enqueue(task, layout=self.layout, terms=terms)
        error = await queued.outcome
        if error is not None:
            raise error

    def _prefixes(self, job: Job) -> Mapping[WorkerRef, int]:
        """The prompt tokens that each prefill worker has cached."""
        if not self._is_aware:
            return {}
        refs = self.queue.workers.pulling().get(fingerprint(self.layout), frozenset())
        return self._cached.cached_refs(MODEL, job.token_words, "", refs)
