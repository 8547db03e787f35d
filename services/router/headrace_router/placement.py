"""Placement: which decode worker serves a request. Pure, so a decision can be replayed and explained.

The cost of a decode worker is in tokens: `overlap_weight` times the prompt tokens that it lacks, plus the tokens that
its blocks hold already. Where hand-overs to it cost more, a missing token has a higher weight. Placement chooses the
cheapest of the fit workers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from random import Random
from typing import Final

import numpy as np

from headrace.inference.v1 import inference_pb2
from headrace.registry.v1 import registry_pb2
from headrace_common.durations import seconds_from_duration
from headrace_common.errors import NoDecodeWorker
from headrace_common.registry.adapters import Adapter
from headrace_kv.layout import KvLayout, WorkerRef
from headrace_router.timed_placement import (
    NO_TARGETS,
    OtherDecision,
    TimedCosts,
    TokenTargets,
    timed_costs,
)
from headrace_router.workers.table import Flags, LoadTable, Numbers, Worker

EXPLAINED_CANDIDATES: Final = 5
# Nearly the time to first token of larger weights, with the balance of smaller ones: bench/results/placement.md.
_DEFAULT_OVERLAP_WEIGHT: Final = 4.0


@dataclass(frozen=True, slots=True)
class RoutePolicy:
    """The part of the deployment's policy for placement. See Policy in registry.proto."""

    local_prefill_max_tokens: int = 0
    overlap_weight: float = _DEFAULT_OVERLAP_WEIGHT
    temperature: float = 0.0
    max_queue_wait_s: float | None = None

    @classmethod
    def from_proto(cls, policy: registry_pb2.Policy) -> RoutePolicy:
        """Converts a policy. Absent fields get their defaults."""
        has_weight = policy.HasField("overlap_weight")
        has_wait = policy.HasField("max_queue_wait")
        return cls(
            local_prefill_max_tokens=policy.local_prefill_max_tokens,
            overlap_weight=policy.overlap_weight if has_weight else _DEFAULT_OVERLAP_WEIGHT,
            temperature=policy.temperature,
            max_queue_wait_s=seconds_from_duration(policy.max_queue_wait) if has_wait else None,
        )


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """The request to place. Workers in `failed` are never chosen, those in `suspect` only as the last resort.

    `local_only` forces prefill on the decode worker. `remaining_s` is the time to the deadline. Only workers with the
    `adapter` are chosen.
    """

    model: str
    prompt_tokens: int
    prefill_placement: inference_pb2.PrefillPlacement.ValueType
    policy: RoutePolicy
    remaining_s: float
    failed: frozenset[WorkerRef] = frozenset()
    suspect: frozenset[WorkerRef] = frozenset()
    local_only: bool = False
    adapter: Adapter | None = None
    targets: TokenTargets = NO_TARGETS


@dataclass(frozen=True, slots=True)
class PairCosts:
    """What the policy for pairs of places makes of each worker of the table. Columns have shape [worker].

    `allowed`: whether a pulling prefill worker may hand KV over to it. `extra` is the cost of a token that is handed
    over from the best of them, relative to computing it.
    """

    allowed: Flags
    extra: Numbers


@dataclass(frozen=True, slots=True)
class Candidates:
    """The workers at one moment.

    `cached_tokens` has shape [worker]: the cached prompt tokens of each worker of the table, with slower tiers counted
    for less. It is None when nothing is known. `prefill` gives the pulling prefill workers by layout fingerprint, and
    `queue_wait_s` how long a prompt would wait for one. `pairs` is None without a policy for pairs of places.
    """

    decode: LoadTable
    cached_tokens: Numbers | None = None
    prefill: Mapping[KvLayout, frozenset[WorkerRef]] = field(default_factory=dict)
    queue_wait_s: float = 0.0
    pairs: PairCosts | None = None


@dataclass(frozen=True, slots=True)
class CandidateCost:
    """One worker's cost and its parts, in tokens. `weight` is the cost of one missing token."""

    worker_id: str
    cost: float
    weight: float
    cached_tokens: int
    missing_tokens: int
    held_tokens: int
    requests: int
    unfit: str
    times: str = ""
    """What a worker of both roles would take. Its cost is in milliseconds, and its weight is 0."""

    def __str__(self) -> str:
        unfit = f", {self.unfit}" if self.unfit else ""
        if self.times:
            return f"{self.worker_id}: {self.cost:.0f} ms, {self.times}, {self.requests} requests{unfit}"
        return (
            f"{self.worker_id}: {self.cost:.0f} = {self.weight:g} x {self.missing_tokens} missing "
            f"({self.cached_tokens} cached) + {self.held_tokens} held, {self.requests} requests{unfit}"
        )


@dataclass(frozen=True, slots=True)
class Decision:
    """The chosen decode worker, whether a prefill worker computes the prompt, and the reasons."""

    worker: Worker
    remote: bool
    explanation: str
    candidates: tuple[CandidateCost, ...] = ()
    missing_tokens: int = 0
    """Prompt tokens that are to be computed."""
    cached_tokens: int = 0
    """Those before them, which the computing worker has."""
    prefill: WorkerRef | None = None
    """The worker that should compute the prompt. None leaves it to the prefill queue."""
    first_s: float | None = None
    """Predicted seconds to the first token, where this was decided by times."""
    others: tuple[OtherDecision, ...] = ()
    """The best other decision of each kind, where this was decided by times."""
    reachable: bool = True
    """False when every worker that may be chosen is unreachable."""

    def without_distrusted(
        self, pulling: Collection[WorkerRef], distrusted: Mapping[WorkerRef, str]
    ) -> Decision:
        """The same decode worker, which computes the prompt itself if it accepts no KV from any worker that pulls.

        `distrusted`: those that it accepts none from, and why.
        """
        if not self.remote or not distrusted:
            return self
        if not distrusted.keys() >= set(pulling) - {self.worker.ref}:
            trusted = self.prefill not in distrusted
            return self if trusted else replace(self, prefill=None)
        why = "; ".join(
            f"{ref.worker_id}: {why}" for ref, why in distrusted.items() if ref in pulling
        )
        return replace(
            self,
            remote=False,
            prefill=None,
            explanation=f"local prefill: the worker accepts no KV ({why}); {self.explanation}",
        )


class Placement(ABC):
    """Chooses from its arguments alone, except that ties may be random."""

    @abstractmethod
    def choose(self, request: PlacementRequest, candidates: Candidates) -> Decision:
        """Chooses a decode worker. Raises NoDecodeWorker when no worker may be chosen."""


class KvAware(Placement):
    """Chooses the fit worker with the lowest cost, and of equals the one with the fewest requests.

    Remaining ties are drawn at random. With a temperature, all cheap workers are drawn at random.
    """

    def __init__(self, random: Random) -> None:
        self._random = random

    def choose(self, request: PlacementRequest, candidates: Candidates) -> Decision:
        table, policy = candidates.decode, request.policy
        usable = ~table.draining
        if request.failed:
            usable &= ~table.flags(request.failed)
        if request.adapter is not None:
            usable &= table.serving(request.adapter)
        usable_count = np.count_nonzero(usable)
        if not usable_count:
            raise _no_decode_worker(request)
        needed_tokens = max(0, request.prompt_tokens - 1)
        if candidates.cached_tokens is None:
            missing: Numbers = np.full(len(table), float(needed_tokens))
        else:
            missing = needed_tokens - np.minimum(candidates.cached_tokens, needed_tokens)
        timed = _timed(request, candidates, missing, usable)
        wants_remote, why = remote_wanted(request, candidates.queue_wait_s)
        weights = _weights(policy.overlap_weight, candidates, remote=wants_remote)
        costs: Numbers = weights * missing + table.held_tokens if timed is None else timed.cost_s
        # These decide before the cost, the most severe first. Most requests meet none of them.
        faults = {"unreachable": ~table.reachable, "full": table.requests >= table.max_num_seqs}
        if request.suspect:
            faults = {"suspect": table.flags(request.suspect), **faults}
        if table.has_restricted:
            # Such a worker gets an answer rather than that the request waits.
            faults["restricted to prefill"] = table.prefill_only
        paired: Flags | None = None
        if wants_remote and timed is None:
            paired = _paired(candidates, request.failed)
            faults["unpaired"] = (missing >= _remote_tokens_min(request)) & ~paired
        fit = _fit(usable, faults)
        row = self._draw(costs, table.requests, fit, policy.temperature)
        reachable = bool(table.reachable[row])
        if timed is not None:
            return _timed_decision(
                timed, table, missing, needed_tokens, usable, faults, fit, row, reachable=reachable
            )
        remote = wants_remote
        if paired is not None:
            remote, why = _remote_pays(
                request, why, missing_tokens=float(missing[row]), paired=bool(paired[row])
            )
        shown = _explained(weights, table, costs, missing, needed_tokens, usable, faults, row)
        return Decision(
            table.workers[row],
            remote,
            f"{'remote' if remote else 'local'} prefill: {why}; cheapest of {usable_count}: {shown[0]}",
            shown,
            missing_tokens=int(missing[row]),
            cached_tokens=needed_tokens - int(missing[row]),
            reachable=reachable,
        )

    def _draw(self, costs: Numbers, requests: Numbers, fit: Flags, temperature: float) -> int:
        rows = fit.nonzero()[0]
        if len(rows) == 1:
            return int(rows[0])
        among = costs[rows]
        low = among.min()
        if temperature <= 0:
            rows = rows[among == low]
            rows = rows[requests[rows] == requests[rows].min()]
            return int(rows[self._random.randrange(len(rows))]) if len(rows) > 1 else int(rows[0])
        spread = float(among.max() - low) or 1.0
        weights = np.exp((low - among) / (spread * temperature))
        return int(self._random.choices(rows.tolist(), weights.tolist())[0])


def _fit(usable: Flags, faults: Mapping[str, Flags]) -> Flags:
    """The usable workers without each fault in turn, as long as one is left."""
    fit = usable
    for flags in faults.values():
        if np.count_nonzero(flags):
            without = fit > flags
            if np.count_nonzero(without):
                fit = without
    return fit


def _weights(overlap_weight: float, candidates: Candidates, *, remote: bool) -> Numbers:
    """The cost of a missing token on each worker."""
    weights: Numbers = np.full(len(candidates.decode), overlap_weight)
    if remote and candidates.pairs is not None:
        weights *= 1.0 + candidates.pairs.extra
    return weights


def _paired(candidates: Candidates, failed: frozenset[WorkerRef]) -> Flags:
    """The workers to which a pulling prefill worker may hand over."""
    pulling = {layout: refs - failed for layout, refs in candidates.prefill.items()}
    paired = candidates.decode.paired({layout for layout, refs in pulling.items() if refs})
    # A worker of both roles hands nothing over to itself.
    alone = [refs for refs in pulling.values() if len(refs) == 1]
    if alone:
        paired &= ~candidates.decode.flags(frozenset().union(*alone))
    return paired if candidates.pairs is None else paired & candidates.pairs.allowed


def _no_decode_worker(request: PlacementRequest) -> NoDecodeWorker:
    return NoDecodeWorker(
        f"no live decode worker serves {request.model}"
        + (f" with adapter {request.adapter}" if request.adapter is not None else "")
        + (f", less {len(request.failed)} that failed" if request.failed else ""),
        metadata={"model": request.model},
    )


def remote_wanted(request: PlacementRequest, queue_wait_s: float) -> tuple[bool, str]:
    """Whether remote prefill is wanted for any worker, and why."""
    policy = request.policy
    if request.local_only:
        return False, "last resort"
    if request.prefill_placement == inference_pb2.PREFILL_PLACEMENT_LOCAL:
        return False, "asked for"
    if request.prompt_tokens < 2:
        return False, "nothing to prefill"
    if request.prefill_placement == inference_pb2.PREFILL_PLACEMENT_REMOTE:
        return True, "asked for"
    bound_s = request.remaining_s
    if policy.max_queue_wait_s is not None:
        bound_s = min(bound_s, policy.max_queue_wait_s)
    if queue_wait_s > bound_s:
        return False, f"the prefill queue takes {queue_wait_s:.2f} s, more than {bound_s:.2f} s"
    return True, "policy"


def _remote_tokens_min(request: PlacementRequest) -> int:
    """A decode worker computes a shorter missing part itself."""
    return max(1, request.policy.local_prefill_max_tokens)


def _remote_pays(
    request: PlacementRequest, why: str, *, missing_tokens: float, paired: bool
) -> tuple[bool, str]:
    """Whether wanted remote prefill is used for the chosen worker, and why."""
    missing_tokens_min = _remote_tokens_min(request)
    forced = request.prefill_placement == inference_pb2.PREFILL_PLACEMENT_REMOTE
    if not forced and missing_tokens < missing_tokens_min:
        return False, f"{missing_tokens:.0f} missing tokens are below {missing_tokens_min}"
    if not paired:
        return False, "no prefill worker with a matching KV layout and place pulls"
    return True, why


def _explained(
    weights: Numbers,
    table: LoadTable,
    costs: Numbers,
    missing: Numbers,
    needed_tokens: int,
    usable: Flags,
    faults: Mapping[str, Flags],
    chosen: int,
) -> tuple[CandidateCost, ...]:
    """The costs of the chosen worker, then of the cheapest others."""
    rows = usable.nonzero()[0]
    if len(rows) > EXPLAINED_CANDIDATES:
        rows = rows[np.argpartition(costs[rows], EXPLAINED_CANDIDATES)[:EXPLAINED_CANDIDATES]]
    others = [row for row in rows[costs[rows].argsort(kind="stable")].tolist() if row != chosen]
    return tuple(
        CandidateCost(
            worker_id=table.workers[row].ref.worker_id,
            cost=float(costs[row]),
            weight=float(weights[row]),
            cached_tokens=int(needed_tokens - missing[row]),
            missing_tokens=int(missing[row]),
            held_tokens=int(table.held_tokens[row]),
            requests=int(table.requests[row]),
            unfit=_unfit(faults, row),
        )
        for row in [chosen, *others][:EXPLAINED_CANDIDATES]
    )


def _unfit(faults: Mapping[str, Flags], row: int) -> str:
    return ", ".join(name for name, flags in faults.items() if flags[row])


def _timed(
    request: PlacementRequest, candidates: Candidates, missing: Numbers, usable: Flags
) -> TimedCosts | None:
    """The costs in seconds, where all workers have both roles and their times are known."""
    table = candidates.decode
    if request.local_only or not table.computes_prompts[usable].all():
        return None
    pulling = frozenset[WorkerRef]().union(*candidates.prefill.values())
    computing = table.flags(pulling - request.failed)
    if np.count_nonzero(computing) < len(pulling - request.failed):
        # Some workers only compute prompts.
        return None
    handing_over: Flags | None = None
    if table.has_restricted:
        handing_over = table.decode_only & (missing >= _remote_tokens_min(request))
    return timed_costs(
        table,
        missing,
        max(0, request.prompt_tokens - 1),
        request.targets,
        usable=usable,
        computing=computing,
        handing_over=handing_over,
        placement=request.prefill_placement,
    )


def _timed_decision(
    timed: TimedCosts,
    table: LoadTable,
    missing: Numbers,
    needed_tokens: int,
    usable: Flags,
    faults: Mapping[str, Flags],
    fit: Flags,
    row: int,
    *,
    reachable: bool,
) -> Decision:
    prefill_row = int(timed.prefill_row[row])
    rows = usable.nonzero()[0]
    rows = rows[timed.cost_s[rows].argsort(kind="stable")][:EXPLAINED_CANDIDATES]
    order = [row, *(other for other in rows.tolist() if other != row)][:EXPLAINED_CANDIDATES]
    shown = tuple(
        CandidateCost(
            worker_id=table.workers[one].ref.worker_id,
            cost=1e3 * float(timed.cost_s[one]),
            weight=0.0,
            cached_tokens=needed_tokens - int(missing[one]),
            missing_tokens=int(missing[one]),
            held_tokens=int(table.held_tokens[one]),
            requests=int(table.requests[one]),
            unfit=_unfit(faults, one),
            times=f"prompt on {table.workers[int(timed.prefill_row[one])].ref.worker_id}, first token after "
            f"{1e3 * timed.first_s[one]:.0f} ms, steps of {1e3 * timed.step_s[one]:.1f} ms",
        )
        for one in order
    )
    remote = prefill_row != row
    return Decision(
        table.workers[row],
        remote,
        f"{'remote' if remote else 'local'} prefill by the times of steps; cheapest of {len(rows)}: {shown[0]}",
        shown,
        missing_tokens=int(missing[prefill_row]),
        cached_tokens=needed_tokens - int(missing[prefill_row]),
        prefill=table.workers[prefill_row].ref if remote else None,
        first_s=float(timed.first_s[row]),
        others=timed.others(table, row, fit),
        reachable=reachable,
    )
