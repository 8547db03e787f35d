"""Kubernetes workloads, and how many of their pods run and serve. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

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
