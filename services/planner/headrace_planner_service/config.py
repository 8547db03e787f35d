"""Settings of the planner service, and the Kubernetes workloads that they name."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Final, Literal

from pydantic import Field, model_validator

from headrace_common import ports
from headrace_common.access.roles import Role
from headrace_common.config import (
    HostPort,
    PositiveSeconds,
    ServiceConfig,
    WorkerId,
    checked_by,
)

_WORKLOAD: Final = re.compile(
    r"(?P<kind>statefulset|deployment)/(?P<name>[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?)"
)


@dataclass(frozen=True, slots=True)
class Workload:
    """A StatefulSet or Deployment of the planner's namespace. `kind` is in small letters."""

    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind}/{self.name}"


@dataclass(frozen=True, slots=True)
class WorkloadState:
    """`wanted` pods should run, `existing` run or end, and `ready` ones serve.

    `is_current`: whether the workload's controller has seen `wanted`. Before that, the others may be old.
    """

    wanted: int
    existing: int
    ready: int
    is_current: bool

    @property
    def has_removed(self) -> bool:
        """Whether no pod beyond `wanted` exists, so all removed workers have drained."""
        return self.is_current and self.existing <= self.wanted

    @property
    def serves(self) -> bool:
        """Whether all wanted workers serve."""
        return self.is_current and self.ready >= self.wanted


def parse_workload(text: str) -> Workload:
    """Parses "statefulset/NAME" or "deployment/NAME". Raises ValueError with the expected form."""
    match = _WORKLOAD.fullmatch(text)
    if match is None:
        raise ValueError(
            "write it as statefulset/NAME or deployment/NAME, such as statefulset/headrace-decode"
        )
    return Workload(match["kind"], match["name"])


Mode = Literal["advise", "publish", "kubernetes"]
WorkloadName = Annotated[str, checked_by(parse_workload, or_empty=True)]
_SAMPLES_MAX = 1_000


class PlannerConfig(ServiceConfig):
    """The planner: decides how many prefill and decode workers a model needs."""

    role = Role.PLANNER

    internal_listen: HostPort = Field(
        f"127.0.0.1:{ports.PLANNER}",
        description="host:port to serve operators on; port 0 takes any free port.",
    )
    model: Annotated[str, Field(min_length=1, max_length=255)] = Field(
        description="Name of the model to plan for, as clients use it. Each model needs a planner of its own."
    )
    planner_id: WorkerId = Field("planner-0", description="Name of the planner in logs.")
    mode: Mode = Field(
        "advise",
        description="advise: decisions are explained, and nothing else happens. publish: decisions are published as "
        "targets, and another process starts and ends workers. kubernetes: the planner scales kubernetes_prefill and "
        "kubernetes_decode.",
    )
    settings_file: str = Field(
        "", description="TOML file of thresholds, goals and budget; empty means their defaults."
    )
    interval_s: PositiveSeconds = Field(30.0, description="Seconds between two decisions.")
    sample_interval_s: PositiveSeconds = Field(
        5.0, description="Seconds between two samples of the load, at most interval_s."
    )
    change_timeout_s: PositiveSeconds = Field(
        900.0,
        description="Seconds in which a published target must be acknowledged. Afterwards the planner decides again. "
        "With mode kubernetes: seconds in which removed workers must end, and then added ones serve.",
    )
    kubernetes_prefill: WorkloadName = Field(
        "",
        description="With mode kubernetes: the workload of the prefill workers, such as statefulset/headrace-prefill "
        "or deployment/NAME.",
    )
    kubernetes_decode: WorkloadName = Field(
        "", description="With mode kubernetes: the workload of the decode workers."
    )
    kubernetes_namespace: Annotated[str, Field(max_length=63)] = Field(
        "", description="Namespace of these workloads; empty means that of the planner's pod."
    )
    kubeconfig: str = Field(
        "",
        description="File that names the Kubernetes API and a credential for it; empty means the service account of "
        "the planner's pod.",
    )
    kubernetes_poll_s: PositiveSeconds = Field(
        2.0, description="Seconds between two looks at workers that start or drain."
    )

    @model_validator(mode="after")
    def _check_intervals(self) -> PlannerConfig:
        if not 1 <= self.interval_s / self.sample_interval_s <= _SAMPLES_MAX:
            raise ValueError(
                f"sample_interval_s is {self.sample_interval_s:g}: an interval of {self.interval_s:g} s must have 1 to "
                f"{_SAMPLES_MAX} samples"
            )
        return self

    @model_validator(mode="after")
    def _check_workloads(self) -> PlannerConfig:
        if self.mode != "kubernetes":
            return self
        missing = [
            name for name in ("kubernetes_prefill", "kubernetes_decode") if not getattr(self, name)
        ]
        if missing:
            raise ValueError(
                f"mode kubernetes needs {' and '.join(missing)}: name a workload, such as statefulset/headrace-decode"
            )
        if self.kubernetes_prefill == self.kubernetes_decode:
            raise ValueError(
                f"kubernetes_prefill and kubernetes_decode are both {self.kubernetes_decode}: each role has its own "
                "workload"
            )
        return self
