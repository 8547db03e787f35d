"""The chart on a real Kubernetes API: accepted, installed, upgraded, rolled back and removed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.component.chart.charts import EXAMPLES
from tests.kube.cluster import Cluster, as_list
from tests.kube.node import FakeNode
from tests.kube.older import older_chart
from tests.waiting import until

pytestmark = [pytest.mark.kube, pytest.mark.timeout(300)]

LIMIT_S = 90.0
INSTANCE = "app.kubernetes.io/instance=headrace"


@pytest.fixture(scope="module")
def chart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return older_chart(tmp_path_factory.mktemp("charts"))


def values(name: str) -> list[str]:
    return ["--values", str(next(path for path in EXAMPLES if path.stem == name))]


def state(cluster: Cluster, namespace: str, kind: str, name: str) -> Any:
    words = ("--namespace", namespace, "get", kind, name, "--output=json")
    return json.loads(cluster.kubectl(*words).stdout)


def ready(cluster: Cluster, namespace: str, name: str) -> int:
    status = state(cluster, namespace, "statefulset", name)["status"]
    return int(status.get("readyReplicas", 0))


@pytest.mark.parametrize("name", [path.stem for path in EXAMPLES])
def test_the_api_accepts_every_manifest_of_an_example(
    cluster: Cluster, namespace: str, chart: Path, name: str
) -> None:
    rendered = cluster.helm(
        "template", "headrace", str(chart), "--namespace", namespace, *values(name)
    )
    found = [item for item in yaml.safe_load_all(rendered.stdout) if item]
    done = cluster.kubectl("apply", "--dry-run=server", "--filename", "-", text=as_list(found))
    assert len(done.stdout.splitlines()) == len(found)
    assert "statefulset.apps/headrace-decode created (server dry run)" in done.stdout
    # A server-side dry run stores nothing.
    stored = cluster.kubectl("--namespace", namespace, "get", "statefulsets", "--output=name")
    assert stored.stdout == ""


def test_an_unknown_field_is_refused(cluster: Cluster, namespace: str, chart: Path) -> None:
    rendered = cluster.helm(
        "template", "headrace", str(chart), "--namespace", namespace, *values("trial")
    )
    text = rendered.stdout.replace("podManagementPolicy: Parallel", "podManagement: Parallel")
    assert text != rendered.stdout
    done = cluster.kubectl("apply", "--dry-run=server", "--filename", "-", text=text, check=False)
    assert done.returncode
    assert "podManagement" in done.stderr


async def test_a_release_is_installed_upgraded_rolled_back_and_removed(
    cluster: Cluster, namespace: str, node: FakeNode, chart: Path
) -> None:
    base = ("headrace", str(chart), "--namespace", namespace, *values("tokens"))
    legacy = ("--server-side=false",)
    cluster.helm("install", *base, *legacy, "--set", "decode.replicas=2")
    await until(lambda: ready(cluster, namespace, "headrace-decode") == 2, LIMIT_S, interval_s=0.2)
    first = state(cluster, namespace, "configmap", "headrace-decode")["data"]["settings.toml"]
    assert "max_num_seqs" not in first
    watch = ("servicemonitor", "prometheusrule")
    assert all(state(cluster, namespace, kind, "headrace")["spec"] for kind in watch)

    changes = "decode.replicas=3,decode.settings.max_num_seqs=7"
    cluster.helm("upgrade", *base, "--set", changes)

    def decode() -> dict[str, Any]:
        """The status of the decode workers' StatefulSet."""
        found = state(cluster, namespace, "statefulset", "headrace-decode")["status"]
        assert isinstance(found, dict)
        return found

    await until(
        lambda: (
            decode().get("readyReplicas") == 3
            and decode().get("updatedReplicas") == 3
            and decode()["currentRevision"] == decode()["updateRevision"]
        ),
        LIMIT_S,
        lambda: f"{decode()} {node.log}",
        interval_s=0.2,
    )
    second = state(cluster, namespace, "configmap", "headrace-decode")["data"]["settings.toml"]
    assert "max_num_seqs = 7" in second
    # A changed setting replaces pods, one at a time: the older ones end before their successors serve.
    assert node.log.count("headrace-decode-0 ends") == 1
    # Prefill has the same settings as before.
    assert node.log.count("headrace-prefill-0 ends") == 0

    cluster.helm("rollback", "headrace", "1", "--namespace", namespace)
    await until(
        lambda: decode().get("replicas") == 2 and decode().get("updatedReplicas") == 2,
        LIMIT_S,
        lambda: f"{decode()} {node.log}",
        interval_s=0.2,
    )
    third = state(cluster, namespace, "configmap", "headrace-decode")["data"]["settings.toml"]
    assert third == first
    history = json.loads(
        cluster.helm("history", "headrace", "--namespace", namespace, "--output", "json").stdout
    )
    assert [entry["status"] for entry in history] == ["superseded", "superseded", "deployed"]

    cluster.helm("uninstall", "headrace", "--namespace", namespace)

    def left() -> str:
        kinds = "all,configmap,serviceaccount,networkpolicy,poddisruptionbudget,role,rolebinding"
        kinds += ",servicemonitor,prometheusrule"
        words = ("--namespace", namespace, "get", kinds, "--selector", INSTANCE, "--output=name")
        return cluster.kubectl(*words).stdout

    await until(lambda: left() == "", LIMIT_S, left, interval_s=0.2)


async def test_an_upgrade_keeps_the_number_that_the_planner_has_set(
    cluster: Cluster, namespace: str, node: FakeNode, chart: Path
) -> None:
    base = ("headrace", str(chart), "--namespace", namespace, *values("planner"))
    cluster.helm("install", *base, "--server-side=false")
    await until(lambda: ready(cluster, namespace, "headrace-decode") == 1, LIMIT_S, interval_s=0.2)
    cluster.kubectl(
        "--namespace", namespace, "scale", "statefulset/headrace-decode", "--replicas=3"
    )
    cluster.helm("upgrade", *base, "--set", "decode.settings.max_num_seqs=7")
    assert state(cluster, namespace, "statefulset", "headrace-decode")["spec"]["replicas"] == 3
    # Without a planner that scales, the chart's number counts.
    cluster.helm("upgrade", *base, "--set", "planner.mode=advise")
    assert state(cluster, namespace, "statefulset", "headrace-decode")["spec"]["replicas"] == 1
