"""The places of all workers, and what the policy makes of them for queue and placement."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np

from headrace.prefill.v1 import prefill_pb2
from headrace.registry.v1 import registry_pb2
from headrace_common.registry.place import Level, Place, place_from_proto
from headrace_kv.layout.layout import KvLayout, WorkerRef
from headrace_router.dispatch.dispatcher import PolicySource
from headrace_router.pairing.rules import LinkTimes, PairRules, cheapest_pair_cost, pair_cost
from headrace_router.placement import PairCosts
from headrace_router.prefill_queue.pairs import ComputeTime, Pulling
from headrace_router.workers.table import LoadTable

# Lags change with each task. Costs by place are computed again at this interval.
_COSTS_AGE_S: Final = 0.5
_US: Final = 1e-6


@dataclass(frozen=True, slots=True)
class _Costs:
    """`result` holds for these arguments until `end_s`."""

    table: LoadTable
    pulling: tuple[tuple[KvLayout, frozenset[WorkerRef]], ...]
    end_s: float
    result: PairCosts


class Pairing:
    """Answers for the places at the policy's level. One event loop owns it.

    `update` must be called with every change of the registry's members. The other methods: see PairPolicy.
    """

    def __init__(self, policy: PolicySource) -> None:
        self._policy = policy
        self._read_policy: registry_pb2.Policy | None = None
        self._rules = PairRules()
        self._links = LinkTimes()
        self._members: tuple[registry_pb2.Member, ...] = ()
        # The members by reference, and their places by level. Made when they are needed.
        self._workers: dict[WorkerRef, registry_pb2.Member] | None = None
        self._places: dict[tuple[WorkerRef, Level], Place | None] = {}
        self._costs: _Costs | None = None

    def update(self, members: Iterable[registry_pb2.Member]) -> None:
        """Replaces the workers by the registry's."""
        self._members, self._workers = tuple(members), None
        self._forget_places()

    @property
    def rules(self) -> PairRules:
        """The rules in force."""
        policy = self._policy.policy
        if policy is not self._read_policy:
            self._read_policy = policy
            rules = PairRules.from_proto(policy)
            if rules.level is not self._rules.level:
                self._links = LinkTimes()
            if rules != self._rules:
                self._rules = rules
                self._forget_places()
        return self._rules

    def fits(self, decode: WorkerRef) -> Callable[[WorkerRef], bool] | None:
        """Whether a prefill worker may hand KV over to a decode worker. None when every one may."""
        rules = self.rules
        if rules.level is Level.NONE or not rules.required:
            return None
        place = self._place(decode, rules.level)
        return lambda prefill: rules.allow(self._place(prefill, rules.level), place)

    def extra_tokens(
        self, decode: WorkerRef, tokens: int, compute_s: ComputeTime
    ) -> Callable[[WorkerRef], float] | None:
        """Cost of handing `tokens` over by prefill worker, in computed tokens. None when it is 0 for each."""
        rules = self.rules
        if rules.level is Level.NONE:
            return None
        place, worker = self._place(decode, rules.level), self._worker(decode)
        token_s = compute_s(worker.model) if worker is not None else 0.0
        links = self._links
        return lambda prefill: (
            tokens * pair_cost(rules, links, token_s, self._place(prefill, rules.level), place)
        )

    def task_done(
        self, prefill: WorkerRef, decode: WorkerRef, tokens: int, done: prefill_pb2.TaskDone
    ) -> None:
        """A prefill worker has handed `tokens` over. Tasks without known times are ignored."""
        times, level = done.times, self.rules.level
        if level is Level.NONE or not (times.compute_end_us and times.last_write_us):
            return
        self._links.record(
            self._place(prefill, level),
            self._place(decode, level),
            tokens=tokens,
            lag_s=_US * (times.last_write_us - times.compute_end_us),
            now_s=time.monotonic(),
        )

    def costs(
        self, table: LoadTable, pulling: Pulling, model: str, compute_s: ComputeTime
    ) -> PairCosts | None:
        """For each decode worker of the table, the cheapest hand-over to it. None without a policy's level."""
        if self.rules.level is Level.NONE:
            return None
        now_s, items = time.monotonic(), tuple(pulling.items())
        known = self._costs
        if known is None or known.table is not table or known.end_s < now_s:
            known = None
        if known is None or known.pulling != items:
            result = self._computed_costs(table, pulling, compute_s(model))
            known = self._costs = _Costs(table, items, now_s + _COSTS_AGE_S, result)
        return known.result

    def _computed_costs(self, table: LoadTable, pulling: Pulling, token_s: float) -> PairCosts:
        level = self._rules.level
        places = {
            layout: {self._place(ref, level) for ref in refs} for layout, refs in pulling.items()
        }
        found: dict[tuple[int, Place | None], float | None] = {}
        allowed = np.zeros(len(table), np.bool_)
        extra = np.zeros(len(table))
        for row, (worker, layout) in enumerate(zip(table.workers, table.layout_of, strict=True)):
            key = int(layout), self._place(worker.ref, level)
            if key not in found:
                prefills = places.get(table.layouts[key[0]], set())
                found[key] = cheapest_pair_cost(self._rules, self._links, token_s, prefills, key[1])
            cost = found[key]
            if cost is not None:
                allowed[row], extra[row] = True, cost
        return PairCosts(allowed, extra)

    def _place(self, ref: WorkerRef, level: Level) -> Place | None:
        """A worker's place at a level. None when it is unknown."""
        if (ref, level) not in self._places:
            worker = self._worker(ref)
            if worker is None:
                return None
            self._places[ref, level] = place_from_proto(worker.place).at(level)
        return self._places[ref, level]

    def _worker(self, ref: WorkerRef) -> registry_pb2.Member | None:
        if self._workers is None:
            self._workers = {
                WorkerRef(member.worker_id, member.incarnation): member for member in self._members
            }
        return self._workers.get(ref)

    def _forget_places(self) -> None:
        self._places, self._costs = {}, None
