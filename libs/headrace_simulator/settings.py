"""What is simulated. The command line writes these settings, and this package reads them."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field

from headrace_common.config import (
    NonNegativeCount,
    NonNegativeSeconds,
    PositiveCount,
    PositiveSeconds,
)
from headrace_planner.observation import WorkerCounts
from headrace_planner.settings import PlannerSettings, WorkerProfile

RUNS_MAX: Final = 64
_WORKERS_MAX: Final = 2_000


class Way(StrEnum):
    """How requests are placed."""

    ROUND_ROBIN = "round robin"
    """The next decode worker, regardless of load and cache."""
    LOAD_ONLY = "load only"
    """The decode worker with the lowest cost, regardless of caches."""
    KV_AWARE = "KV-aware"
    """The decode worker with the lowest cost, and prefill workers that have the prefix."""
    KV_AWARE_TIERS = "KV-aware, tiers"
    """The same, and workers keep evicted blocks in main memory."""
    PLAIN = "plain engines"
    """Of workers of both roles, the one with most of the prompt cached, or else with the fewest requests, does both."""


POOL_WAYS: Final = tuple(one for one in Way if one is not Way.PLAIN)
"""Those of prefill and decode workers."""


class Scaling(StrEnum):
    """What changes the numbers of workers."""

    FIXED = "fixed"
    PLANNER = "planner"


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ScalingSettings(_Settings):
    """When decisions are made, and how long a new worker takes to start."""

    scaling: Scaling = Scaling.FIXED
    planner: PlannerSettings = PlannerSettings()
    interval_s: PositiveSeconds = 30.0
    samples: Annotated[int, Field(ge=1, le=100)] = 6
    worker_start_s: NonNegativeSeconds = 30.0


class SimulationSettings(_Settings):
    """One replay. `ttft_s` and `itl_s` are the goals of each request, and its targets where requests are `bounded`.

    With `both_workers`, all workers have both roles, and the numbers of the others do not count.
    """

    prefill_workers: Annotated[int, Field(ge=0, le=_WORKERS_MAX)] = 1
    decode_workers: Annotated[int, Field(ge=1, le=_WORKERS_MAX)] = 1
    both_workers: Annotated[int, Field(ge=0, le=_WORKERS_MAX)] = 0
    way: Way = Way.KV_AWARE
    host_tokens: NonNegativeCount = Field(
        default=0, description="Tokens that main memory of a worker holds, with tiers."
    )
    local_prefill_max_tokens: NonNegativeCount = Field(
        default=0, description="With fewer missing tokens, the decode worker prefills."
    )
    max_model_len: PositiveCount = 1_000_000
    ttft_s: PositiveSeconds = 0.5
    itl_s: PositiveSeconds = 0.05
    bounded: bool = True
    early_refusal: bool = False
    seed: NonNegativeCount = 0
    scaling: ScalingSettings = ScalingSettings()

    @property
    def have_targets(self) -> bool:
        """Whether requests carry the goals."""
        return self.bounded and self.way is not Way.PLAIN

    @property
    def workers(self) -> WorkerCounts:
        """The first workers."""
        if self.both_workers:
            return WorkerCounts(0, 0, self.both_workers)
        return WorkerCounts(self.prefill_workers, self.decode_workers)


class SimulationSpec(_Settings):
    """What the process that simulates reads: replays of one trace up to `seconds_max`, one for each of `runs`."""

    trace: str
    seconds_max: PositiveSeconds | None = None
    profile: WorkerProfile
    runs: Annotated[tuple[SimulationSettings, ...], Field(min_length=1, max_length=RUNS_MAX)]
