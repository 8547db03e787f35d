"""The planner's settings and profiles of workers, and the files that have them.

A profile has the time to first token by prompt length, and the time between tokens by KV usage and context length.
"""

from __future__ import annotations

import json
import tomllib
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from headrace_common.config import (
    NonNegativeCount,
    NonNegativeSeconds,
    PositiveCount,
    PositiveSeconds,
    require_order,
)
from headrace_common.errors import ConfigError

_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_POINTS_MAX = 10_000
_MEASURED_CHARACTERS_MAX = 4_000


class _Point(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class PrefillPoint(_Point):
    """The time to first token of one prompt on an idle prefill worker."""

    prompt_tokens: _Positive
    ttft_s: PositiveSeconds


class DecodePoint(_Point):
    """A decode worker at one KV usage and mean context length."""

    kv_usage: Annotated[float, Field(ge=0, le=1)]
    context_tokens: _Positive
    itl_s: PositiveSeconds
    tokens_per_s: _Positive

    @property
    def requests(self) -> float:
        """The requests that make tokens at the same time."""
        return self.tokens_per_s * self.itl_s


class TransferTime(_Point):
    """The time to hand the KV cache of a prompt over, apart from computing it."""

    fixed_s: NonNegativeSeconds = 0.0
    s_per_token: NonNegativeSeconds = 0.0


class WorkerProfile(_Point):
    """Measured points of one prefill worker and one decode worker.

    The simulator also needs the size of a worker: the tokens that its KV memory holds and the most requests of a decode
    worker. Both are 0 where they are unknown. `measured` says what was measured.
    """

    prefill: Annotated[tuple[PrefillPoint, ...], Field(min_length=1, max_length=_POINTS_MAX)]
    decode: Annotated[tuple[DecodePoint, ...], Field(min_length=1, max_length=_POINTS_MAX)]
    kv_tokens: NonNegativeCount = 0
    max_num_seqs: NonNegativeCount = 0
    transfer: TransferTime = TransferTime()
    host_load_s_per_token: NonNegativeSeconds = 0.0
    measured: Annotated[str, Field(max_length=_MEASURED_CHARACTERS_MAX)] = ""

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        lengths = [point.prompt_tokens for point in self.prefill]
        if sorted(set(lengths)) != lengths:
            raise ValueError("write the points of prefill in increasing order of prompt_tokens")
        return self

    def ttft_s(self, prompt_tokens: float) -> float:
        """Time to first token on an idle prefill worker, linear between the points.

        Below the first point it is that of the first, and beyond the last it grows with the length.
        """
        lengths = [point.prompt_tokens for point in self.prefill]
        times = [point.ttft_s for point in self.prefill]
        if prompt_tokens >= lengths[-1]:
            return times[-1] * prompt_tokens / lengths[-1]
        return _between(lengths, times, prompt_tokens)

    def expected_itl_s(self, kv_usage: float, context_tokens: float) -> float:
        """Time between tokens at this usage, from the points with the nearest context length."""
        points = self._points_near(context_tokens)
        usages = [point.kv_usage for point in points]
        return _between(usages, [point.itl_s for point in points], kv_usage)

    def step_s(self, requests: float, context_tokens: float) -> float:
        """Time of a decode step of so many requests with this mean context.

        It is linear between the numbers of requests and between the context lengths that were measured. It goes on in
        a line beyond the most requests, and is that of the nearest context beyond the others.
        """
        contexts = sorted({point.context_tokens for point in self.decode})
        times = [self._step_at(requests, context) for context in contexts]
        return _between(contexts, times, context_tokens)

    def _step_at(self, requests: float, context_tokens: float) -> float:
        """The same at a context length that was measured."""
        points = sorted(
            (point for point in self.decode if point.context_tokens == context_tokens),
            key=lambda point: point.requests,
        )
        last = points[-1]
        if requests > last.requests and len(points) > 1:
            before = points[-2]
            slope = (last.itl_s - before.itl_s) / max(1e-9, last.requests - before.requests)
            return last.itl_s + max(0.0, slope) * (requests - last.requests)
        return _between(
            [point.requests for point in points], [point.itl_s for point in points], requests
        )

    def best_decode(self, itl_s: float, context_tokens: float) -> DecodePoint:
        """The load with the most tokens per second that reaches `itl_s`, on the lines between measured points.

        It has the nearest context length. When no point reaches `itl_s`, the fastest one is returned.
        """
        points = self._points_near(context_tokens)
        reaching = [point for point in points if point.itl_s <= itl_s]
        if not reaching:
            return min(points, key=lambda point: point.itl_s)
        between = [
            _point_with(itl_s, before, after)
            for before, after in pairwise(points)
            if before.itl_s < itl_s < after.itl_s
        ]
        return max((*reaching, *between), key=lambda point: point.tokens_per_s)

    def _points_near(self, context_tokens: float) -> list[DecodePoint]:
        """The points of the context length next to this one, by usage."""
        nearest = min(
            (point.context_tokens for point in self.decode),
            key=lambda length: (abs(length - context_tokens), length),
        )
        points = [point for point in self.decode if point.context_tokens == nearest]
        return sorted(points, key=lambda point: point.kv_usage)


def _point_with(itl_s: float, before: DecodePoint, after: DecodePoint) -> DecodePoint:
    """The point with this time between tokens on the line between two points."""
    share = (itl_s - before.itl_s) / (after.itl_s - before.itl_s)
    return DecodePoint(
        kv_usage=before.kv_usage + share * (after.kv_usage - before.kv_usage),
        context_tokens=before.context_tokens,
        itl_s=itl_s,
        tokens_per_s=before.tokens_per_s + share * (after.tokens_per_s - before.tokens_per_s),
    )


def _between(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Linear interpolation. Outside of the points it is the value of the nearest one."""
    index = bisect_left(xs, x)
    if index == 0:
        return ys[0]
    if index == len(xs):
        return ys[-1]
    share = (x - xs[index - 1]) / (xs[index] - xs[index - 1])
    return ys[index - 1] + share * (ys[index] - ys[index - 1])


_Share = Annotated[float, Field(gt=0, le=1)]
_Load = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class LoadSettings(_Settings):
    """Thresholds of the decision by load."""

    prefill_up_queue: _Load = Field(
        default=0.5, description="Queued prompts per prefill worker above which one is added."
    )
    prefill_down_queue: _Load = Field(
        default=0.2, description="Queued prompts per prefill worker below which one is removed."
    )
    low_prompt_weight: Annotated[float, Field(ge=0, le=1)] = Field(
        default=1.0,
        description="What a queued prompt of class low counts for in these: 0 adds no worker for low requests.",
    )
    decode_up_load: _Load = Field(
        default=0.9, description="Mean load of decode workers above which one is added."
    )
    decode_down_load: _Load = Field(
        default=0.5, description="Mean load of decode workers below which one is removed."
    )
    trend_intervals: NonNegativeCount = Field(
        default=3,
        description="Intervals by which the queue's trend is extended: without queue then, no prefill worker is added.",
    )
    decode_grace_intervals: NonNegativeCount = Field(
        default=3,
        description="Intervals after the addition of a decode worker in which none is removed.",
    )

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        require_order(
            self,
            ("prefill_down_queue", "prefill_up_queue"),
            ("decode_down_load", "decode_up_load"),
        )
        return self


class GoalSettings(_Settings):
    """Goals of latency, for the decision by a worker's profile."""

    ttft_s: PositiveSeconds = Field(default=0.5, description="Goal of the time to first token.")
    itl_s: PositiveSeconds = Field(default=0.05, description="Goal of the time between tokens.")
    share: Annotated[float, Field(ge=0.5, le=0.999)] = Field(
        default=0.9, description="Share of the requests that should reach a goal."
    )


class BudgetSettings(_Settings):
    """Bounds on the numbers of workers. A device is a unit of cost, such as a GPU."""

    prefill_workers_min: NonNegativeCount = Field(default=1, description="Fewest prefill workers.")
    decode_workers_min: PositiveCount = Field(default=1, description="Fewest decode workers.")
    both_workers_min: PositiveCount = Field(
        default=1, description="Fewest workers of both roles, where all have both."
    )
    devices_max: PositiveCount = Field(
        default=8, description="Most devices of all workers together."
    )
    prefill_worker_devices: PositiveCount = Field(
        default=1, description="Devices of a prefill worker."
    )
    decode_worker_devices: PositiveCount = Field(
        default=1, description="Devices of a decode worker."
    )
    both_worker_devices: PositiveCount = Field(
        default=1, description="Devices of a worker of both roles."
    )

    @model_validator(mode="after")
    def _check_floors(self) -> Self:
        floors = (
            self.prefill_workers_min * self.prefill_worker_devices
            + self.decode_workers_min * self.decode_worker_devices
        )
        floors = max(floors, self.both_workers_min * self.both_worker_devices)
        if floors > self.devices_max:
            raise ValueError(
                f"the fewest workers need {floors} devices, more than devices_max = {self.devices_max}: "
                "raise devices_max or lower the minimums"
            )
        return self


class PlannerSettings(_Settings):
    """All settings of the planner."""

    load: LoadSettings = LoadSettings()
    goals: GoalSettings = GoalSettings()
    budget: BudgetSettings = BudgetSettings()
    history_intervals_max: PositiveCount = Field(
        default=100, description="Intervals that predictions are made from."
    )
    season_intervals: NonNegativeCount = Field(
        default=0, description="Intervals of one period of the load, such as a day; 0 for none."
    )
    shrink_intervals: NonNegativeCount = Field(
        default=5,
        description="Decisions in which no rule may have needed a worker before it is removed.",
    )
    correction_max: Annotated[float, Field(ge=1, le=100)] = Field(
        default=4.0,
        description="Bound on the factor by which observed latency may correct the profile.",
    )
    backtest_share: _Share = Field(
        default=0.5, description="Share of the history on which predictors are compared."
    )


_Model = TypeVar("_Model", bound=BaseModel)


def read_settings(path: Path | None) -> PlannerSettings:
    """The settings of a file, or the defaults. Raises ConfigError that names every wrong field."""
    if path is None:
        return PlannerSettings()
    try:
        content = tomllib.loads(_text_of(path))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: no valid TOML: {error}") from None
    return _validated(PlannerSettings, path, content)


def read_profile(path: Path | None) -> WorkerProfile | None:
    """The profile of a file, or None. Raises ConfigError that names every wrong field."""
    if path is None:
        return None
    try:
        content = json.loads(_text_of(path))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: no valid JSON: {error}") from None
    return _validated(WorkerProfile, path, content)


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}; name a file that can"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: no text in UTF-8: {error}") from None


def _validated(model: type[_Model], path: Path, content: object) -> _Model:
    try:
        return model.model_validate(content)
    except ValidationError as error:
        problems = [
            f"{'.'.join(map(str, problem['loc'])) or 'all'}: {problem['msg']}"
            for problem in error.errors(include_url=False, include_input=False)
        ]
        raise ConfigError(f"{path}: " + "; ".join(problems)) from None
