"""The planner's settings and profiles of workers, and the files that have them."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from headrace_common.config import (
    NonNegativeCount,
    NonNegativeSeconds,
    PositiveCount,
    PositiveSeconds,
    problem_text,
    require_order,
)
from headrace_common.errors import ConfigError
from headrace_common.time_model.model import (
    NO_HANDOVERS,
    HandoverTimes,
    StepTimes,
    TimeModel,
    impossible_part,
    mean_model,
)

_MEASURED_CHARACTERS_MAX = 4_000


class _Point(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class WorkerProfile(_Point):
    """What is known of the workers of a model: the parts of the times of their steps and hand-overs, and their size.

    Sizes are 0 where they are unknown: the tokens that the KV memory of a worker holds, the bytes of one of them, and
    the most requests of a worker that generates. `measured` says where the values are from.
    """

    steps: StepTimes
    handovers: HandoverTimes = NO_HANDOVERS
    kv_tokens: NonNegativeCount = 0
    kv_bytes_per_token: NonNegativeCount = 0
    max_num_seqs: NonNegativeCount = 0
    max_num_batched_tokens: PositiveCount = Field(
        default=8_192, description="Most prompt tokens of a step."
    )
    host_load_s_per_token: NonNegativeSeconds = 0.0
    measured: Annotated[str, Field(max_length=_MEASURED_CHARACTERS_MAX)] = ""

    @model_validator(mode="after")
    def _check_times(self) -> Self:
        wrong = impossible_part(self.steps, self.handovers)
        if wrong:
            raise ValueError(f"{wrong} must be a number from 0")
        if not (self.steps.knows_prompts and self.steps.knows_answers):
            raise ValueError(
                "the times of at least 5 steps with prompts and with answers are needed"
            )
        return self

    def prompt_s(self, prompt_tokens: float, prior_tokens: float = 0) -> float:
        """Time of an idle worker to compute these tokens of a prompt, after `prior_tokens` of it."""
        steps = self.steps
        step_count = math.ceil(prompt_tokens / self.max_num_batched_tokens)
        attended = prompt_tokens * (prior_tokens + prompt_tokens / 2)
        return (
            step_count * (steps.fixed_s + steps.prompt_s)
            + steps.s_per_prompt_token * prompt_tokens
            + steps.s_per_attended_token * attended
        )

    def handover_s(self, tokens: float) -> float:
        """Time from the end of computing these tokens until another worker has their KV."""
        times = self.handovers
        return times.fixed_s + times.s_per_byte * self.kv_bytes_per_token * tokens

    def step_s(self, answers: float, context_tokens: float) -> float:
        """Time of a step of so many answers with this mean context, without prompts."""
        steps = self.steps
        each_s = steps.s_per_answer + steps.s_per_context_token * context_tokens
        return steps.fixed_s + each_s * answers

    def answers_within(self, itl_s: float, context_tokens: float) -> float:
        """The most answers of a worker with steps of at most `itl_s`; at least 1."""
        one_s = self.step_s(1, context_tokens)
        more_s = max(1e-9, one_s - self.steps.fixed_s)
        most = 1 + (itl_s - one_s) / more_s
        if self.max_num_seqs:
            most = min(most, self.max_num_seqs)
        if self.kv_tokens:
            most = min(most, self.kv_tokens / max(1.0, context_tokens))
        return max(1.0, most)


def learned_profile(
    prompts: Collection[TimeModel], answers: Collection[TimeModel], *, max_num_seqs: int = 0
) -> WorkerProfile | None:
    """The mean of what workers have learned: those that compute prompts, and those that generate.

    None while no worker knows the times of one of them.
    """
    computing = mean_model([one for one in prompts if one.steps.knows_prompts])
    generating = mean_model([one for one in answers if one.steps.knows_answers]).steps
    prompt = computing.steps
    if not prompt.knows_prompts or not generating.knows_answers:
        return None
    # A worker that computes prompts only does not know which part of a step every step has.
    steps = replace(
        generating,
        prompt_s=max(0.0, prompt.fixed_s + prompt.prompt_s - generating.fixed_s),
        s_per_prompt_token=prompt.s_per_prompt_token,
        s_per_attended_token=prompt.s_per_attended_token,
        s_per_sent_token=prompt.s_per_sent_token,
        prompt_steps=prompt.prompt_steps,
    )
    return WorkerProfile(steps=steps, handovers=computing.handovers, max_num_seqs=max_num_seqs)


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
    return None if path is None else read_json(path, WorkerProfile)


def read_json(path: Path, model: type[_Model]) -> _Model:
    """The content of a JSON file. Raises ConfigError that names every wrong field."""
    try:
        content = json.loads(_text_of(path))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: no valid JSON: {error}") from None
    return _validated(model, path, content)


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
            f"{'.'.join(map(str, problem['loc'])) or 'all'}: {problem_text(problem)}"
            for problem in error.errors(include_url=False, include_input=False)
        ]
        raise ConfigError(f"{path}: " + "; ".join(problems)) from None
