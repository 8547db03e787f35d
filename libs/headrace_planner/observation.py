"""What the planner observes of one model's deployment, what it decides, and recordings of both. Pure.

A recording of a deployment can be planned again with other settings.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Annotated, Final, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from headrace_common.config import NonNegativeCount, NonNegativeSeconds, PositiveSeconds
from headrace_common.errors import ConfigError
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
    """Numbers of workers that have one role, and of those that have both."""

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
        return {
            PlannedRole.PREFILL: self.prefill,
            PlannedRole.DECODE: self.decode,
            PlannedRole.BOTH: self.both,
        }[role]

    def changed(self, role: PlannedRole, count: int) -> WorkerCounts:
        """The counts with another number for one role."""
        match role:
            case PlannedRole.PREFILL:
                return replace(self, prefill=count)
            case PlannedRole.DECODE:
                return replace(self, decode=count)
        return replace(self, both=count)

    def __str__(self) -> str:
        if self.is_pool:
            return f"{self.both} W"
        return f"{self.prefill} P, {self.decode} D" + (f", {self.both} W" if self.both else "")


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


LINE_BYTES_MAX = 1 << 20
INTERVALS_MAX = 1_000_000
_WORKERS_MAX = 10_000
_SAMPLES_MAX = 1_000
_Mean = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Line(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class _DecodeWorker(_Line):
    kv_usage: Annotated[float, Field(ge=0, le=1)]
    waiting_requests: NonNegativeCount = 0
    slot_usage: Annotated[float, Field(ge=0, le=1)] = 0.0


class _ClassCounts(_Line):
    high: NonNegativeCount = 0
    normal: NonNegativeCount = 0
    low: NonNegativeCount = 0


class _Sample(_Line):
    prefill_workers: NonNegativeCount
    queued_prompts: NonNegativeCount
    decode: Annotated[tuple[_DecodeWorker, ...], Field(max_length=_WORKERS_MAX)]
    queued_by_class: _ClassCounts = _ClassCounts()
    both_workers: NonNegativeCount = 0

    @model_validator(mode="after")
    def _check_both(self) -> Self:
        if self.both_workers > len(self.decode):
            raise ValueError("both_workers counts workers of decode")
        return self


class _Requests(_Line):
    request_count: NonNegativeCount
    prompt_tokens: _Mean
    answer_tokens: _Mean
    ttft_s: NonNegativeSeconds
    itl_s: NonNegativeSeconds
    duration_s: NonNegativeSeconds
    cached_share: Annotated[float, Field(ge=0, le=1)] = 0.0


class _Interval(_Line):
    start_unix_s: NonNegativeSeconds
    duration_s: PositiveSeconds
    samples: Annotated[tuple[_Sample, ...], Field(min_length=1, max_length=_SAMPLES_MAX)]
    requests: _Requests | None = None
    profile: WorkerProfile | None = None


def read_intervals(lines: Iterable[str]) -> Iterator[Interval]:
    """Parses a recording. Empty lines are skipped.

    Raises ConfigError that names the line and every wrong field of it.
    """
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if number > INTERVALS_MAX or len(line) > LINE_BYTES_MAX:
            raise ConfigError(
                f"line {number}: a recording has at most {INTERVALS_MAX} lines of {LINE_BYTES_MAX} characters: "
                "split it"
            )
        try:
            parsed = _Interval.model_validate_json(line)
        except ValidationError as error:
            raise ConfigError(_detail(number, error)) from None
        yield _interval(parsed)


def interval_line(interval: Interval) -> str:
    """The line of a recording for this interval, without the end of the line."""
    content = asdict(interval)
    content["profile"] = interval.profile and interval.profile.model_dump(exclude_defaults=True)
    content = {name: value for name, value in content.items() if value is not None}
    return json.dumps(content, allow_nan=False)


def _detail(number: int, error: ValidationError) -> str:
    problems = [
        f"{'.'.join(map(str, problem['loc'])) or 'the line'}: {problem['msg']}"
        for problem in error.errors(include_url=False, include_input=False)
    ]
    return f"line {number}: " + "; ".join(problems)


def _interval(parsed: _Interval) -> Interval:
    samples = tuple(
        LoadSample(
            sample.prefill_workers,
            sample.queued_prompts,
            tuple(DecodeLoad(**dict(worker)) for worker in sample.decode),
            ClassCounts(**dict(sample.queued_by_class)),
            sample.both_workers,
        )
        for sample in parsed.samples
    )
    requests = RequestStatistics(**dict(parsed.requests)) if parsed.requests is not None else None
    return Interval(parsed.start_unix_s, parsed.duration_s, samples, requests, parsed.profile)
