"""Workloads of Kubernetes by their names, and when their workers run."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from headrace_planner_service.config import PlannerConfig, Workload, WorkloadState, parse_workload

BOTH = {"kubernetes_prefill": "statefulset/p", "kubernetes_decode": "deployment/d"}


@pytest.mark.parametrize("kind", ["statefulset", "deployment"])
def test_a_workload_is_named_by_kind_and_name(kind: str) -> None:
    workload = parse_workload(f"{kind}/headrace-decode.v2")
    assert workload == Workload(kind, "headrace-decode.v2")
    assert str(workload) == f"{kind}/headrace-decode.v2"


def test_workers_serve_once_the_controller_has_seen_their_number() -> None:
    assert WorkloadState(wanted=3, existing=3, ready=3, is_current=True).serves
    assert not WorkloadState(wanted=3, existing=3, ready=2, is_current=True).serves
    assert not WorkloadState(wanted=3, existing=3, ready=3, is_current=False).serves


def test_workers_are_removed_once_their_pods_have_ended() -> None:
    assert WorkloadState(wanted=1, existing=1, ready=1, is_current=True).has_removed
    assert not WorkloadState(wanted=1, existing=2, ready=1, is_current=True).has_removed
    assert not WorkloadState(wanted=1, existing=1, ready=1, is_current=False).has_removed


@pytest.mark.parametrize(
    "settings, problem",
    [
        ({}, "needs kubernetes_prefill and kubernetes_decode"),
        ({"kubernetes_prefill": "statefulset/a"}, "needs kubernetes_decode"),
        ({**BOTH, "kubernetes_decode": "statefulset/p"}, "each role has its own workload"),
        ({**BOTH, "kubernetes_decode": "d"}, "write it as statefulset/NAME"),
        ({**BOTH, "kubernetes_poll_s": 0}, "greater than 0"),
    ],
)
def test_mode_kubernetes_needs_both_workloads(settings: dict[str, object], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        PlannerConfig.model_validate({"model": "m", "mode": "kubernetes", **settings})


def test_other_modes_need_none() -> None:
    assert PlannerConfig.model_validate({"model": "m"}).kubernetes_prefill == ""
    accepted = {"model": "m", "mode": "kubernetes", **BOTH}
    assert PlannerConfig.model_validate(accepted).kubernetes_decode == "deployment/d"
