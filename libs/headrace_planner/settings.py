"""Settings of the planner. The defaults are those of Dynamo's planner where it has the same rule."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from headrace_common.config import NonNegativeCount, PositiveCount, PositiveSeconds, require_order

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
    devices_max: PositiveCount = Field(
        default=8, description="Most devices of all workers together."
    )
    prefill_worker_devices: PositiveCount = Field(
        default=1, description="Devices of a prefill worker."
    )
    decode_worker_devices: PositiveCount = Field(
        default=1, description="Devices of a decode worker."
    )

    @model_validator(mode="after")
    def _check_floors(self) -> Self:
        floors = (
            self.prefill_workers_min * self.prefill_worker_devices
            + self.decode_workers_min * self.decode_worker_devices
        )
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
