"""What the planner observes of one model's deployment, and what it decides. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from headrace_common.errors import Conflict
from headrace_planner.settings import WorkerProfile

WAITING_REQUEST_LOAD: Final = 0.02
"""Share of a decode worker's KV memory that a waiting request counts for (Dynamo's planner has the same weight)."""


class PlannedRole(StrEnum):
    """A role with a planned number of workers."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


@dataclass(frozen=True, slots=True)
class WorkerCounts:
    """Numbers of workers that have one role, and of those that have both. The fields are named as the roles."""

    prefill: int
    decode: int
    both: int = 0

    @property
    def is_pool(self) -> bool:
        """Whether all workers have both roles."""
        return self.both > 0 and not self.prefill and not self.decode

    @property
    def roles(self) -> tuple[PlannedRole, ...]:
        """The roles of the deployment's workers: prefill and decode, unless all have both."""
        if self.is_pool:
            return (PlannedRole.BOTH,)
        return tuple(PlannedRole)[: 3 if self.both else 2]

    def of(self, role: PlannedRole) -> int:
        """The number of workers of the role."""
        count: int = getattr(self, role)
        return count

    def beyond(self, other: WorkerCounts) -> WorkerCounts:
        """What these are above `other`, role by role, and 0 where they are not."""
        return WorkerCounts(*(max(0, self.of(role) - other.of(role)) for role in PlannedRole))

    def changed(self, role: PlannedRole, count: int) -> WorkerCounts:
        """The counts with another number for one role."""
        return replace(self, **{role: count})

    def __str__(self) -> str:
        if self.is_pool:
            return f"{self.both} W"
        return f"{self.prefill} P, {self.decode} D" + (f", {self.both} W" if self.both else "")


NO_WORKERS: Final = WorkerCounts(0, 0)


def own_target(own: WorkerCounts, observed: WorkerCounts, wanted: WorkerCounts) -> WorkerCounts:
    """The workers that a scaler with `own` workers shall run, for a target of `wanted` that `observed` led to.

    Observed workers beyond its own were started by others: they count, and it never stops them. Raises Conflict where
    it has more than were observed.
    """
    if own != wanted and own.beyond(observed) != NO_WORKERS:
        raise Conflict(
            f"it was decided from {observed}, and {own} run here",
            metadata={"observed": str(observed), "running": str(own)},
        )
    return wanted.beyond(observed.beyond(own))


@dataclass(frozen=True, slots=True)
class DecodeLoad:
    """The load of one decode worker.

    `kv_usage` is the share of its KV blocks in use, and `slot_usage` that of its slots, both from 0 to 1.
    """

    kv_usage: float
    waiting_requests: int = 0
    slot_usage: float = 0.0

    @property
    def load(self) -> float:
        """The usage of the scarcer resource, and a part for each waiting request. It exceeds 1 when requests wait for a
        full worker.
        """
        return max(self.kv_usage, self.slot_usage) + WAITING_REQUEST_LOAD * self.waiting_requests


@dataclass(frozen=True, slots=True)
class ClassCounts:
    """Prompts of each class of requests."""

    high: int = 0
    normal: int = 0
    low: int = 0


@dataclass(frozen=True, slots=True)
class LoadSample:
    """The load at one moment. `queued_prompts` wait in the prefill queues of all routers, or on prefill workers.

    `queued_by_class` has those in the queues of routers. `decode` has the workers that generate. Of these,
    `both_workers` compute prompts too.
    """

    prefill_workers: int
    queued_prompts: int
    decode: tuple[DecodeLoad, ...]
    queued_by_class: ClassCounts = ClassCounts()
    both_workers: int = 0

    @property
    def counts(self) -> WorkerCounts:
        """Workers that serve at this moment."""
        decode = len(self.decode) - self.both_workers
        return WorkerCounts(self.prefill_workers, decode, self.both_workers)

    def queue_per_worker(self, low_prompt_weight: float = 1.0) -> float:
        """Queued prompts for each worker that computes prompts. Without a worker, all of them.

        A low prompt counts as `low_prompt_weight` prompts.
        """
        low = min(self.queued_prompts, self.queued_by_class.low)
        counted = self.queued_prompts - (1 - low_prompt_weight) * low
        return counted / max(1, self.prefill_workers + self.both_workers)

    @property
    def decode_load(self) -> float:
        """Mean load of the decode workers, 0 without one."""
        return sum(worker.load for worker in self.decode) / max(1, len(self.decode))


@dataclass(frozen=True, slots=True)
class RequestStatistics:
    """The requests that ended within an interval. All but the count are means."""

    request_count: int
    prompt_tokens: float
    answer_tokens: float
    ttft_s: float
    itl_s: float
    duration_s: float
    cached_share: float = 0.0
    """Share of the prompt tokens that a prefix cache had, from 0 to 1."""


@dataclass(frozen=True, slots=True)
class Interval:
    """What was observed between two decisions. `requests` is None when no request ended.

    `profile` is what the workers have learned of their times by then, None while they have not.
    """

    start_unix_s: float
    duration_s: float
    samples: tuple[LoadSample, ...]
    requests: RequestStatistics | None = None
    profile: WorkerProfile | None = None

    @property
    def counts(self) -> WorkerCounts:
        """Workers at the end of the interval."""
        return self.samples[-1].counts

    @property
    def is_changing(self) -> bool:
        """Whether workers joined or left within the interval."""
        return any(sample.counts != self.counts for sample in self.samples)


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a rule asks for a number of workers. `inputs` are the figures that the rule compared, by name."""

    role: PlannedRole
    rule: str
    count: int
    inputs: Mapping[str, float]
    sentence: str


@dataclass(frozen=True, slots=True)
class ScalingDecision:
    """The numbers of workers that should run from now on, and every rule that applied, in order."""

    current: WorkerCounts
    target: WorkerCounts
    reasons: tuple[Reason, ...]

    @property
    def is_change(self) -> bool:
        """Whether a worker must be added or removed."""
        return self.target != self.current
