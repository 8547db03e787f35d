"""The planner's calls of a real Kubernetes API: numbers, waits, permissions, other writers."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from headrace_common.errors import (
    ConfigError,
    Conflict,
    DeadlineExceeded,
    PermissionDenied,
)
from headrace_planner.observation import WorkerCounts
from headrace_planner_service.config import PlannerConfig, Workload
from headrace_planner_service.kubernetes_connector import WorkloadScaler, open_scaler
from tests.component.chart.charts import EXAMPLES
from tests.kube.cluster import Cluster
from tests.kube.node import FakeNode
from tests.kube.older import older_chart
from tests.ports import free_port
from tests.waiting import until

pytest.importorskip("lightkube", reason="needs the extra kubernetes")
pytestmark = [pytest.mark.kube, pytest.mark.timeout(300)]

LIMIT_S = 90.0
DECODE, PREFILL = "headrace-decode", "headrace-prefill"
ONE = WorkerCounts(1, 1)


@pytest.fixture
async def planner(
    cluster: Cluster, namespace: str, node: FakeNode, tmp_path: Path
) -> PlannerConfig:
    """The settings of the planner in a release: with its own service account, and the Role of the chart."""
    example = next(path for path in EXAMPLES if path.stem == "planner")
    words = ("install", "headrace", str(older_chart(tmp_path)), "--namespace", namespace)
    cluster.helm(*words, "--values", str(example), "--server-side=false")
    token = cluster.service_account_token(namespace, "headrace-planner")
    config = PlannerConfig.model_validate(
        {
            "model": "sim",
            "mode": "kubernetes",
            "kubeconfig": str(cluster.write_kubeconfig(f"planner-{namespace}", token, namespace)),
            "kubernetes_prefill": f"statefulset/{PREFILL}",
            "kubernetes_decode": f"statefulset/{DECODE}",
            "kubernetes_poll_s": 0.05,
            "change_timeout_s": LIMIT_S,
        }
    )
    await until(
        lambda: len(node.log) >= 2 and serving(node) >= {f"{DECODE}-0"}, LIMIT_S, str(node.log)
    )
    return config


def serving(node: FakeNode) -> set[str]:
    return {line.removesuffix(" serves") for line in node.log if line.endswith(" serves")}


@asynccontextmanager
async def scaling(config: PlannerConfig) -> AsyncIterator[WorkloadScaler]:
    async with open_scaler(config) as scaler:
        yield scaler


async def test_workers_are_added_and_removed(planner: PlannerConfig, node: FakeNode) -> None:
    async with scaling(planner) as scaler:
        node.held = {f"{DECODE}-2"}
        change = asyncio.create_task(scaler.apply(ONE, WorkerCounts(2, 3)))
        await until(lambda: {f"{PREFILL}-1", f"{DECODE}-1"} <= serving(node), LIMIT_S)
        # One worker does not serve yet.
        assert not change.done()
        node.held = set()
        await asyncio.wait_for(change, LIMIT_S)
        assert f"{DECODE}-2" in serving(node)

        # Removed workers drain before another is added.
        node.log.clear()
        node.held = {f"{DECODE}-2"}
        change = asyncio.create_task(scaler.apply(WorkerCounts(2, 3), WorkerCounts(3, 1)))
        await until(lambda: f"{DECODE}-1 ends" in node.log, LIMIT_S)
        # Long enough for a pod that is added too early to serve.
        rounds = node.rounds
        await until(lambda: node.rounds >= rounds + 20, LIMIT_S)
        assert not change.done()
        assert f"{PREFILL}-2" not in serving(node)
        node.held = set()
        await asyncio.wait_for(change, LIMIT_S)
        assert node.log.index(f"{DECODE}-2 ends") < node.log.index(f"{PREFILL}-2 serves")


async def test_workers_that_do_not_serve_are_given_up(
    planner: PlannerConfig, node: FakeNode
) -> None:
    node.held = {f"{PREFILL}-1"}
    async with scaling(planner.model_copy(update={"change_timeout_s": 1.0})) as scaler:
        with pytest.raises(
            DeadlineExceeded, match=f"statefulset/{PREFILL} has 2 pods, 1 ready, of 2"
        ):
            await scaler.apply(ONE, WorkerCounts(2, 1))
        node.held = set()
    async with scaling(planner) as scaler:
        # The number is as before, and the pod ends.
        await scaler.apply(ONE, WorkerCounts(1, 2))


async def test_the_number_of_another_writer_is_not_overwritten(
    cluster: Cluster, namespace: str, planner: PlannerConfig
) -> None:
    async with scaling(planner) as scaler:
        words = ("--namespace", namespace, "scale", f"statefulset/{DECODE}", "--replicas=4")
        cluster.kubectl(*words)
        with pytest.raises(Conflict, match="the workloads have 1 P, 4 D"):
            await scaler.apply(ONE, WorkerCounts(1, 2))
        api, workload = scaler._api, Workload("statefulset", DECODE)
        with pytest.raises(Conflict, match="was set to 4 meanwhile, from 1"):
            await api.scale(workload, 2, 1)


async def test_the_planner_may_scale_the_workers_and_nothing_else(
    cluster: Cluster, namespace: str, planner: PlannerConfig
) -> None:
    def may(*words: str) -> str:
        answer = cluster.kubectl(
            *("--kubeconfig", planner.kubeconfig, "auth", "can-i", *words), check=False
        )
        return answer.stdout.strip()

    for name in (PREFILL, DECODE):
        assert may("get", f"statefulset/{name}") == "yes"
        assert may("update", f"statefulset/{name}", "--subresource=scale") == "yes"
        for verb in ("update", "patch", "delete"):
            assert may(verb, f"statefulset/{name}") == "no"
    for words in (
        ("list", "statefulsets"),
        ("update", "statefulset/other", "--subresource=scale"),
        ("update", "deployment/headrace-router", "--subresource=scale"),
        *(("get", kind) for kind in ("secrets", "pods", "configmaps", "nodes")),
        ("create", "pods"),
        ("get", f"statefulset/{DECODE}", "--namespace", "kube-system"),
    ):
        assert may(*words) == "no", words
    other = Workload("deployment", "headrace-router")
    async with scaling(planner) as scaler:
        with pytest.raises(PermissionDenied, match="cannot get resource"):
            await scaler._api.read(other)
        with pytest.raises(PermissionDenied, match="cannot get resource"):
            await scaler._api.scale(other, 3, 2)


async def test_a_planner_that_cannot_see_its_workloads_does_not_start(
    cluster: Cluster, planner: PlannerConfig, tmp_path: Path
) -> None:
    for update, problem in (
        ({"kubernetes_decode": "statefulset/other"}, "refused to get statefulset/other"),
        ({"kubernetes_namespace": "kube-system"}, "refused to get"),
        ({"kubeconfig": str(tmp_path / "none")}, "cannot be read"),
        ({"kubeconfig": ""}, "the pod's service account cannot be read"),
    ):
        with pytest.raises(ConfigError, match=problem):
            async with scaling(planner.model_copy(update=update)):
                pass
    other = dataclasses.replace(cluster, url=f"https://127.0.0.1:{free_port()}")
    gone = other.write_kubeconfig("gone", "none", "default")
    with pytest.raises(ConfigError, match="the Kubernetes API does not answer"):
        async with scaling(planner.model_copy(update={"kubeconfig": str(gone)})):
            pass
