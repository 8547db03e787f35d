"""Placement: which decode worker serves a request. Pure, so a decision can be replayed and explained.

It chooses the cheapest of the fit workers: headrace_router.costs.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Final

import numpy as np

from headrace.inference.v1 import inference_pb2
from headrace.registry.v1 import registry_pb2
from headrace_common.durations import seconds_from_duration
from headrace_common.errors import NoDecodeWorker
from headrace_common.registry.adapters import Adapter
from headrace_kv.layout import WorkerRef
from headrace_router.costs import (
    DIVIDED_MIN_S,
    NO_TARGETS,
    Asked,
    Candidates,
    Costs,
    CostsOfBoth,
    OtherDecision,
    TokenTargets,
    alone_s,
    best_parts,
    costs_of_both,
    costs_of_pools,
)
from headrace_router.workers.table import Flags, LoadTable, Numbers, Worker

EXPLAINED_CANDIDATES: Final = 5
_DEFAULT_OVERLAP_WEIGHT: Final = 4.0
"""With it, missing tokens cost their time."""
_LENGTH_GAIN: Final = 0.05
_FIRST_LENGTH: Final = 128.0


class AnswerLengths:
    """The mean length of the answers of each model. Recent ones count more. One event loop owns it."""

    def __init__(self) -> None:
        self._means: dict[str, float] = {}

    def ended(self, model: str, tokens: int) -> None:
        """An answer has ended after `tokens`."""
        mean = self._means.get(model, float(tokens))
        self._means[model] = mean + _LENGTH_GAIN * (tokens - mean)

    def expected(self, model: str, tokens_max: int) -> float:
        """Tokens that an answer of at most `tokens_max` is expected to have."""
        return max(1.0, min(self._means.get(model, _FIRST_LENGTH), tokens_max))


@dataclass(frozen=True, slots=True)
class RoutePolicy:
    """The part of the deployment's policy for placement. See Policy in registry.proto."""

    local_prefill_max_tokens: int = 0
    overlap_weight: float = _DEFAULT_OVERLAP_WEIGHT
    temperature: float = 0.0
    max_queue_wait_s: float | None = None
    divide_gain: float = 0.0
    gather_fill: float = 0.0

    @classmethod
    def from_proto(cls, policy: registry_pb2.Policy) -> RoutePolicy:
        """Converts a policy. Absent fields get their defaults."""
        has_weight, has_wait = policy.HasField("overlap_weight"), policy.HasField("max_queue_wait")
        return cls(
            local_prefill_max_tokens=policy.local_prefill_max_tokens,
            overlap_weight=policy.overlap_weight if has_weight else _DEFAULT_OVERLAP_WEIGHT,
            temperature=policy.temperature,
            max_queue_wait_s=seconds_from_duration(policy.max_queue_wait) if has_wait else None,
            divide_gain=policy.divide_gain,
            gather_fill=policy.gather_fill,
        )


@dataclass(slots=True)
class PlacementRequest:
    """The request to place. It must not be changed: freezing it would take most of the time to make it.

    Workers in `failed` are never chosen, those in `suspect` only as the last resort.

    `local_only` forces prefill on the decode worker. `remaining_s` is the time to the deadline. Only workers with the
    `adapter` are chosen. `early_first`: whether a prefill worker makes the first token, or sends its hidden state.
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
    early_first: bool = False
    may_divide: bool = False
    """Whether two workers may compute the prompt."""


def candidate_text(one: inference_pb2.Candidate) -> str:
    """A candidate for people."""
    unfit = f", {one.unfit}" if one.unfit else ""
    return (
        f"{one.worker_id}: {one.cost_ms:.0f} ms, prompt on {one.prefill_worker_id or 'a prefill worker'}, first token "
        f"after {one.first_token_ms:.0f} ms, steps of {one.step_ms:.1f} ms, {one.missing_tokens} missing "
        f"({one.cached_tokens} cached), {one.held_tokens} held, {one.requests} requests{unfit}"
    )


@dataclass(slots=True)
class Decision:
    """The chosen decode worker, whether a prefill worker computes the prompt, and why. It must not be changed."""

    worker: Worker
    remote: bool
    why: str
    shown: tuple[tuple[tuple[str, str, str], tuple[float, ...]], ...]
    """Of the chosen worker and of the cheapest others, in no order, what `candidates` has."""
    missing_tokens: int = 0
    """Prompt tokens that are to be computed."""
    cached_tokens: int = 0
    """Those before them, which the computing worker has."""
    decode_cached_tokens: int = 0
    """Prompt tokens that the chosen worker has."""
    prefill: WorkerRef | None = None
    """The worker that should compute the prompt. None leaves it to the prefill queue."""
    first_s: float | None = None
    """Predicted seconds to the first token, among workers of both roles that have learned their times."""
    others: tuple[OtherDecision, ...] = ()
    """The best other decision of each kind, likewise."""
    computes_from: int = 0
    """The first token that the chosen worker computes beside `prefill`. 0: the prompt is not divided."""
    reachable: bool = True
    """False when every worker that may be chosen is unreachable."""

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens that one worker computes before the chosen one goes on."""
        return (
            self.computes_from - self.cached_tokens if self.computes_from else self.missing_tokens
        )

    @property
    def candidates(self) -> tuple[inference_pb2.Candidate, ...]:
        """The chosen worker, then the cheapest others. `prefix_fault` is empty."""
        needed_tokens = self.missing_tokens + self.cached_tokens
        first, *others = (
            inference_pb2.Candidate(
                worker_id=worker_id,
                prefill_worker_id=prefill_worker_id,
                unfit=unfit,
                cost_ms=1e3 * cost_s,
                first_token_ms=1e3 * first_s,
                step_ms=1e3 * step_s,
                cached_tokens=needed_tokens - int(missing),
                missing_tokens=int(missing),
                held_tokens=int(held),
                requests=int(requests),
            )
            for (worker_id, prefill_worker_id, unfit), numbers in self.shown
            for cost_s, first_s, step_s, missing, held, requests in (numbers,)
        )
        others.sort(key=lambda one: one.cost_ms)
        return (first, *others[: EXPLAINED_CANDIDATES - 1])

    @property
    def explanation(self) -> str:
        """The reasons."""
        how = "remote" if self.remote else "local"
        return f"{how} prefill: {self.why}: {candidate_text(self.candidates[0])}"

    def without_distrusted(
        self, pulling: Collection[WorkerRef], distrusted: Mapping[WorkerRef, str]
    ) -> Decision:
        """The same decode worker, which computes the prompt itself if it accepts no KV from any worker that pulls.

        `distrusted`: those that it accepts none from, and why.
        """
        if not self.remote or not distrusted:
            return self
        if not distrusted.keys() >= set(pulling) - {self.worker.ref}:
            if self.prefill not in distrusted:
                return self
            return replace(self, prefill=None, computes_from=0)
        why = "; ".join(
            f"{ref.worker_id}: {why}" for ref, why in distrusted.items() if ref in pulling
        )
        why = f"the worker accepts no KV ({why}); remote prefill: {self.why}"
        return replace(self, remote=False, prefill=None, computes_from=0, why=why)


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
            missing: Numbers = np.full(len(table.workers), float(needed_tokens))
        else:
            missing = needed_tokens - np.minimum(candidates.cached_tokens, needed_tokens)
        table.times.fill(candidates.prefill_times.steps)
        missing_weight = policy.overlap_weight / _DEFAULT_OVERLAP_WEIGHT
        asked = Asked(missing, needed_tokens, request.targets, missing_weight, request.early_first)
        # These decide before the cost, the most severe first. Most requests meet none of them.
        faults = {"full": table.requests >= table.max_num_seqs}
        if table.unreachable_count:
            faults = {"unreachable": ~table.reachable, **faults}
        if request.suspect:
            faults = {"suspect": table.flags(request.suspect), **faults}
        if table.has_restricted:
            # Such a worker gets an answer rather than that the request waits.
            faults["restricted to prefill"] = table.prefill_only
        costs, why, unpaired = _costs(request, candidates, asked, usable)
        if unpaired is not None:
            faults["unpaired"] = unpaired
        fit, faults = _fit(usable, faults)
        if policy.gather_fill:
            bound_s = request.targets.tpot_s or np.inf
            room = table.roomy(1, request.prompt_tokens, bound_s, policy.gather_fill)
            awake = fit & room & (table.requests > 0)
            fit = awake if np.count_nonzero(awake) else fit
        row = self._draw(costs.cost_s, table.requests, fit, policy.temperature)
        prefill_row = int(costs.prefill_row[row])
        if unpaired is not None and prefill_row == row:
            why = _why_local(request, float(missing[row]))
        planned = prefill_row >= 0
        missing_tokens = int(missing[prefill_row if planned else row])
        first_s: float | None = None
        others: tuple[OtherDecision, ...] = ()
        # Priors are no predictions.
        if isinstance(costs, CostsOfBoth) and table.times.all_known(usable):
            first_s, others = float(costs.first_s[row]), costs.others(table, asked, row, fit)
        decision = Decision(
            table.workers[row],
            prefill_row != row,
            f"{why}; cheapest of {usable_count}",
            _shown(table, asked, costs, usable, faults, row),
            missing_tokens=missing_tokens,
            cached_tokens=needed_tokens - missing_tokens,
            decode_cached_tokens=needed_tokens - int(missing[row]),
            prefill=table.workers[prefill_row].ref if planned and prefill_row != row else None,
            first_s=first_s,
            others=others,
            reachable=bool(table.reachable[row]),
        )
        return decision if first_s is None else _divided(decision, request, table, asked, costs)

    def _draw(self, costs: Numbers, requests: Numbers, fit: Flags, temperature: float) -> int:
        if temperature <= 0:
            among = _masked(costs, fit)
            rows = (among == among[among.argmin()]).nonzero()[0]
            if len(rows) > 1:
                rows = rows[requests[rows] == requests[rows].min()]
            return int(rows[self._random.randrange(len(rows))]) if len(rows) > 1 else int(rows[0])
        rows = fit.nonzero()[0]
        among = costs[rows]
        low = among.min()
        spread = float(among.max() - low) or 1.0
        weights = np.exp((low - among) / (spread * temperature))
        return int(self._random.choices(rows.tolist(), weights.tolist())[0])


def division(
    table: LoadTable, asked: Asked, costs: CostsOfBoth, row: int, gain: float
) -> tuple[int, int, float] | None:
    """The best division of a prompt that worker `row` answers, if its first token is that much earlier.

    Returns the row of the worker that computes the first tokens, the token after them, and when the answer begins.
    Worker `row` begins with the first layer of the other one's last step, and waits in each layer. So it must have no
    answers, which would wait too, and the other one no prompts. Both have learned their times.
    """
    undivided_s = float(costs.first_s[row])
    if table.requests[row] or row in table.times.with_prompts:
        return None
    computed_s = costs.computed_s.copy()
    computed_s[[row, *table.times.with_prompts]] = np.inf
    other = int(computed_s.argmin())
    # Answers of the other one take a share of its time.
    slower = max(1.0, computed_s[other] / max(DIVIDED_MIN_S, alone_s(table, asked, other)))
    if not math.isfinite(slower):
        return None
    workers, cached_tokens = table.workers, asked.needed_tokens - asked.missing
    found = best_parts(
        (table.times.column(other) * slower, table.times.column(row)),
        (int(cached_tokens[other]), int(cached_tokens[row])),
        asked.needed_tokens + 1,
        min(workers[row].step_tokens, workers[other].step_tokens),
        workers[row].layout,
        gain,
        undivided_s=undivided_s,
    )
    return None if found is None else (other, found[0][0], found[1])


def _divided(
    decision: Decision, request: PlacementRequest, table: LoadTable, asked: Asked, costs: Costs
) -> Decision:
    """The decision with two workers that compute the prompt, where that is worth it."""
    gain = request.policy.divide_gain
    if not (gain and request.may_divide and isinstance(costs, CostsOfBoth)):
        return decision
    found = division(table, asked, costs, table.workers.index(decision.worker), gain)
    if found is None:
        return decision
    other, token, first_s = found
    prefill = table.workers[other].ref
    cached = asked.needed_tokens - int(asked.missing[other])
    return replace(
        decision,
        remote=True,
        why=f"{decision.why}; beside {prefill.worker_id}, which computes up to token {token}",
        missing_tokens=asked.needed_tokens - cached,
        cached_tokens=cached,
        prefill=prefill,
        first_s=first_s,
        others=(),
        computes_from=token,
    )


def _masked(costs: Numbers, flags: Flags) -> Numbers:
    """Infinite without the flag."""
    return costs if np.count_nonzero(flags) == len(flags) else np.where(flags, costs, np.inf)


def _fit(usable: Flags, faults: Mapping[str, Flags]) -> tuple[Flags, dict[str, Flags]]:
    """The usable workers without each fault in turn, as long as one is left; and the faults that any worker has."""
    fit, present = usable, {}
    for name, flags in faults.items():
        if np.count_nonzero(flags):
            present[name] = flags
            without = fit > flags
            if np.count_nonzero(without):
                fit = without
    return fit, present


def _costs(
    request: PlacementRequest, candidates: Candidates, asked: Asked, usable: Flags
) -> tuple[Costs, str, Flags | None]:
    """The costs, why prompts are computed where they are, and which workers lack a prefill worker, if one is wanted."""
    table, by_layout = candidates.decode, candidates.prefill
    if request.failed:
        by_layout = {layout: refs - request.failed for layout, refs in by_layout.items()}
    pulling = table.pulling(by_layout)
    enough = asked.missing >= max(1, request.policy.local_prefill_max_tokens)
    forced: bool | Flags = request.prefill_placement == inference_pb2.PREFILL_PLACEMENT_REMOTE
    if (
        not request.local_only
        and pulling.within
        and not np.count_nonzero(usable > table.computes_prompts)
    ):
        computing = usable & pulling.computing
        if request.prefill_placement == inference_pb2.PREFILL_PLACEMENT_LOCAL:
            computing = np.zeros_like(usable)
        elif table.has_restricted and not forced:
            forced = table.decode_only & enough
        costs = costs_of_both(candidates, asked, computing, forced)
        return costs, "by the times of workers of both roles", None
    wanted, why = remote_wanted(request, candidates.queue_wait_s)
    if not wanted:
        return costs_of_pools(candidates, asked, None), why, None
    pairs = candidates.pairs
    paired = pulling.paired if pairs is None else pulling.paired & pairs.allowed
    remote = paired if forced else enough & paired
    return costs_of_pools(candidates, asked, remote), why, enough > paired


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


def _why_local(request: PlacementRequest, missing_tokens: float) -> str:
    """Why a worker computes a prompt itself that might go to the queue."""
    tokens_min = max(1, request.policy.local_prefill_max_tokens)
    forced = request.prefill_placement == inference_pb2.PREFILL_PLACEMENT_REMOTE
    if missing_tokens < tokens_min and not forced:
        return f"{missing_tokens:.0f} missing tokens are below {tokens_min}"
    return "no prefill worker with a matching KV layout and place pulls"


def _shown(
    table: LoadTable,
    asked: Asked,
    costs: Costs,
    usable: Flags,
    faults: Mapping[str, Flags],
    row: int,
) -> tuple[tuple[tuple[str, str, str], tuple[float, ...]], ...]:
    """See Decision."""
    cheapest: Sequence[int] = range(len(table.workers))
    if len(table.workers) > EXPLAINED_CANDIDATES:
        order = np.argpartition(_masked(costs.cost_s, usable), EXPLAINED_CANDIDATES)
        cheapest = order[:EXPLAINED_CANDIDATES].tolist()
    rows = [row, *(one for one in cheapest if one != row and usable[one])]
    found: list[tuple[tuple[str, str, str], tuple[float, ...]]] = []
    columns = (costs.cost_s, costs.first_s, costs.step_s, asked.missing)
    for one in rows:
        by = costs.prefill_row.item(one)
        name = (
            table.workers[one].ref.worker_id,
            table.workers[by].ref.worker_id if by >= 0 else "",
            ", ".join([name for name, flags in faults.items() if flags[one]]) if faults else "",
        )
        values = [column.item(one) for column in (*columns, table.held_tokens, table.requests)]
        found.append((name, tuple(values)))
    return tuple(found)
