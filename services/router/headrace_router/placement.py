"""Where a request goes. Pure: a decision follows from what it is given, so it can be replayed and explained.

Every decode worker gets a cost in tokens: `overlap_weight` times the prompt tokens that it would have to get from
somewhere, plus the tokens that its blocks hold already. The cheapest one is chosen, among those that are fit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Final

import numpy as np

from headrace.inference.v1 import inference_pb2
from headrace.registry.v1 import registry_pb2
from headrace_common.errors import NoDecodeWorker
from headrace_kv.layout.layout import KvLayout, WorkerRef
from headrace_router.workers.table import Flags, LoadTable, Numbers, Worker

EXPLAINED_CANDIDATES: Final = 5
# Most of what more weight gains in time to first token, at the balance of less: bench/results/placement.md.
_DEFAULT_OVERLAP_WEIGHT: Final = 4.0


@dataclass(frozen=True, slots=True)
class RoutePolicy:
    """The part of the deployment's policy that placement follows. See registry.proto's Policy."""

    local_prefill_max_tokens: int = 0
    overlap_weight: float = _DEFAULT_OVERLAP_WEIGHT
    temperature: float = 0.0
    max_queue_wait_s: float | None = None

    @classmethod
    def from_proto(cls, policy: registry_pb2.Policy) -> RoutePolicy:
        """With every default filled in."""
        weighted = policy.HasField("overlap_weight")
        waits = policy.HasField("max_queue_wait")
        return cls(
            local_prefill_max_tokens=policy.local_prefill_max_tokens,
            overlap_weight=policy.overlap_weight if weighted else _DEFAULT_OVERLAP_WEIGHT,
            temperature=policy.temperature,
            max_queue_wait_s=policy.max_queue_wait.ToNanoseconds() / 1e9 if waits else None,
        )


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """What is to be placed. `failed` may not be chosen again; `suspect` only when nothing else is left.

    `local_only` forces the last resort: prefill on the decode worker. `remaining_s` is the time to the deadline.
    """

    model: str
    prompt_tokens: int
    wish: inference_pb2.PrefillPlacement.ValueType
    policy: RoutePolicy
    remaining_s: float
    failed: frozenset[WorkerRef] = frozenset()
    suspect: frozenset[WorkerRef] = frozenset()
    local_only: bool = False


@dataclass(frozen=True, slots=True)
class Candidates:
    """Everyone who could take it, at one moment.

    `cached_tokens`, of shape [worker], is what of the prompt each worker of the table holds, slower tiers counted for
    less; None when nothing is known. `prefill` holds, by layout fingerprint, the prefill workers that pull, and
    `queue_wait_s` how long a prompt would wait for one.
    """

    decode: LoadTable
    cached_tokens: Numbers | None = None
    prefill: Mapping[KvLayout, frozenset[WorkerRef]] = field(default_factory=dict)
    queue_wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class CandidateCost:
    """One worker's cost and what it is made of, in tokens; `weight` is that of a missing one."""

    worker_id: str
    cost: float
    weight: float
    cached_tokens: int
    missing_tokens: int
    held_tokens: int
    requests: int
    unfit: str

    def __str__(self) -> str:
        unfit = f", {self.unfit}" if self.unfit else ""
        return (
            f"{self.worker_id}: {self.cost:.0f} = {self.weight:g} x {self.missing_tokens} missing "
            f"({self.cached_tokens} cached) + {self.held_tokens} held, {self.requests} requests{unfit}"
        )


@dataclass(frozen=True, slots=True)
class Decision:
    """A decode worker, whether a prefill worker computes the prompt, and why."""

    worker: Worker
    remote: bool
    explanation: str
    candidates: tuple[CandidateCost, ...] = ()


class Placement(ABC):
    """Chooses by what it is given alone, but for ties."""

    @abstractmethod
    def choose(self, request: PlacementRequest, candidates: Candidates) -> Decision:
        """Raises NoDecodeWorker when nobody may take it."""


class KvAware(Placement):
    """The fit worker with the lowest cost, of equals the one with the fewest requests.

    What is still equal is drawn by lot, and with a temperature so are the cheap ones.
    """

    def __init__(self, random: Random) -> None:
        self._random = random

    def choose(self, request: PlacementRequest, candidates: Candidates) -> Decision:
        table, policy = candidates.decode, request.policy
        usable = ~(table.draining | table.flags(request.failed))
        if not usable.any():
            raise _nobody(request)
        wanted = max(0, request.prompt_tokens - 1)
        missing = np.full(len(table), float(wanted))
        if candidates.cached_tokens is not None:
            missing -= np.minimum(candidates.cached_tokens, wanted)
        costs: Numbers = policy.overlap_weight * missing + table.held_tokens
        wish, why = _wish(request, candidates.queue_wait_s)
        partners = {layout for layout, refs in candidates.prefill.items() if refs - request.failed}
        paired = table.paired(partners)
        # What decides before the cost does, the gravest first.
        faults = (
            table.flags(request.suspect),
            ~table.reachable,
            table.requests >= table.max_num_seqs,
            (missing >= max(1, policy.local_prefill_max_tokens)) & ~paired & wish,
        )
        unfitness = sum(flags.astype(np.int64) << (3 - i) for i, flags in enumerate(faults))
        fit = usable & (unfitness == np.min(unfitness, where=usable, initial=1 << 4))
        row = self._draw(costs, table.requests, fit, policy.temperature)
        remote, why = _remote(request, wish, why, float(missing[row]), bool(paired[row]))
        shown = _explained(
            policy.overlap_weight, table, costs, missing, wanted, usable, faults, row
        )
        return Decision(
            table.workers[row],
            remote,
            f"{'remote' if remote else 'local'} prefill: {why}; cheapest of {int(usable.sum())}: {shown[0]}",
            shown,
        )

    def _draw(self, costs: Numbers, requests: Numbers, fit: Flags, temperature: float) -> int:
        rows = np.flatnonzero(fit)
        among = costs[rows]
        low = among.min()
        if temperature <= 0:
            rows = rows[among == low]
            rows = rows[requests[rows] == requests[rows].min()]
            return int(rows[self._random.randrange(len(rows))]) if len(rows) > 1 else int(rows[0])
        spread = float(among.max() - low) or 1.0
        weights = np.exp((low - among) / (spread * temperature))
        return int(self._random.choices(rows.tolist(), weights.tolist())[0])


def _nobody(request: PlacementRequest) -> NoDecodeWorker:
    return NoDecodeWorker(
        f"no live decode worker serves {request.model}"
        + (f", less {len(request.failed)} that failed" if request.failed else ""),
        metadata={"model": request.model},
    )


def _wish(request: PlacementRequest, queue_wait_s: float) -> tuple[bool, str]:
    """Whether a remote prefill is wanted as far as that does not depend on the worker, and why."""
    policy = request.policy
    if request.local_only:
        return False, "last resort"
    if request.wish == inference_pb2.PREFILL_PLACEMENT_LOCAL:
        return False, "asked for"
    if request.prompt_tokens < 2:
        return False, "nothing to prefill"
    if request.wish == inference_pb2.PREFILL_PLACEMENT_REMOTE:
        return True, "asked for"
    bound_s = request.remaining_s
    if policy.max_queue_wait_s is not None:
        bound_s = min(bound_s, policy.max_queue_wait_s)
    if queue_wait_s > bound_s:
        return False, f"the prefill queue takes {queue_wait_s:.2f} s, more than {bound_s:.2f} s"
    return True, "policy"


def _remote(
    request: PlacementRequest, wish: bool, why: str, missing_tokens: float, paired: bool
) -> tuple[bool, str]:
    """The same for the chosen worker."""
    bound = request.policy.local_prefill_max_tokens
    asked = request.wish == inference_pb2.PREFILL_PLACEMENT_REMOTE
    if not wish:
        return False, why
    if not asked and missing_tokens < max(1, bound):
        return False, f"{missing_tokens:.0f} missing tokens are below {max(1, bound)}"
    if not paired:
        return False, "no prefill worker with a matching KV layout pulls"
    return True, why


_FAULTS = ("suspect", "unreachable", "full", "unpaired")


def _explained(
    weight: float,
    table: LoadTable,
    costs: Numbers,
    missing: Numbers,
    wanted: int,
    usable: Flags,
    faults: tuple[Flags, ...],
    chosen: int,
) -> tuple[CandidateCost, ...]:
    """The chosen worker, then the cheapest others."""
    rows = np.flatnonzero(usable)
    if len(rows) > EXPLAINED_CANDIDATES:
        rows = rows[np.argpartition(costs[rows], EXPLAINED_CANDIDATES)[:EXPLAINED_CANDIDATES]]
    others = [row for row in rows[np.argsort(costs[rows], kind="stable")].tolist() if row != chosen]
    return tuple(
        CandidateCost(
            worker_id=table.workers[row].ref.worker_id,
            cost=float(costs[row]),
            weight=weight,
            cached_tokens=int(wanted - missing[row]),
            missing_tokens=int(missing[row]),
            held_tokens=int(table.held_tokens[row]),
            requests=int(table.requests[row]),
            unfit=", ".join(
                name for name, flags in zip(_FAULTS, faults, strict=True) if flags[row]
            ),
        )
        for row in [chosen, *others][:EXPLAINED_CANDIDATES]
    )
