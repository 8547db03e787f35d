"""The chart's custom resources on a real Kubernetes API, with the definitions of tests/component/chart/custom.py."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.component.chart.charts import CUSTOM, Manifest, example
from tests.component.chart.custom import DEFINITIONS
from tests.kube.cluster import Cluster, as_list

pytestmark = [pytest.mark.kube, pytest.mark.timeout(300)]

PATHS = {
    definition.resource: f"/apis/{definition.group}/{definition.version}/namespaces/{{}}/"
    f"{definition.plural}"
    for definition in DEFINITIONS
}


def custom_of(name: str, namespace: str) -> list[Manifest]:
    found = [item for item in example(name) if (item["apiVersion"], item["kind"]) in CUSTOM]
    moved = [{**item, "metadata": {**item["metadata"], "namespace": namespace}} for item in found]
    return copy.deepcopy(moved)


def of_kind(name: str, namespace: str, kind: str) -> Manifest:
    return next(item for item in custom_of(name, namespace) if item["kind"] == kind)


def contains(stored: Any, wanted: Any) -> bool:
    """Whether everything that is wanted is stored. The server adds defaults."""
    if isinstance(wanted, dict):
        return isinstance(stored, dict) and all(
            name in stored and contains(stored[name], value) for name, value in wanted.items()
        )
    if isinstance(wanted, list):
        return (
            isinstance(stored, list)
            and len(stored) == len(wanted)
            and all(map(contains, stored, wanted))
        )
    return bool(stored == wanted)


@pytest.mark.parametrize("name", ["gateway", "keda", "tls", "tokens"])
def test_the_api_stores_every_field_of_the_custom_resources(
    cluster: Cluster, namespace: str, name: str
) -> None:
    items = custom_of(name, namespace)
    cluster.kubectl("apply", "--filename", "-", text=as_list(items))
    with cluster.api() as api:
        for item in items:
            path = PATHS[item["apiVersion"], item["kind"]].format(namespace)
            answer = api.get(f"{path}/{item['metadata']['name']}")
            assert answer.status_code == 200, answer.text
            # The server drops fields that the definition lacks.
            assert contains(answer.json()["spec"], item["spec"]), answer.text
    again = cluster.kubectl("apply", "--filename", "-", text=as_list(items))
    assert all(line.endswith(" unchanged") for line in again.stdout.splitlines())


@pytest.mark.parametrize(
    "name,kind,path,value,named",
    [
        ("tokens", "ServiceMonitor", ("endpoints", 0, "interval"), "15", "interval"),
        ("keda", "ScaledObject", ("triggers",), [], "triggers"),
        ("gateway", "InferencePool", ("endpointPickerRef", "failureMode"), "Open", "failureMode"),
        ("tls", "Certificate", ("secretName",), None, "secretName"),
    ],
)
def test_the_api_refuses_a_wrong_value(
    cluster: Cluster,
    namespace: str,
    name: str,
    kind: str,
    path: tuple[str | int, ...],
    value: Any,
    named: str,
) -> None:
    item = of_kind(name, namespace, kind)
    *parents, last = path
    at: Any = item["spec"]
    for step in parents:
        at = at[step]
    at[last] = value
    with cluster.api() as api:
        answer = api.post(PATHS[item["apiVersion"], kind].format(namespace), json=item)
    assert answer.status_code == 422
    assert named in answer.json()["message"]


def test_kubectl_refuses_an_unknown_field(cluster: Cluster, namespace: str) -> None:
    item = of_kind("keda", namespace, "ScaledObject")
    item["spec"]["maxReplicas"] = 3
    done = cluster.kubectl("apply", "--filename", "-", text=as_list([item]), check=False)
    assert done.returncode
    assert "maxReplicas" in done.stderr
