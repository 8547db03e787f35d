"""The custom resources of the chart have the fields of their definitions, and no others."""

from __future__ import annotations

import copy
from typing import Any

import jsonschema
import pytest

from tests.component.chart.charts import CUSTOM, EXAMPLES, Manifest, example, require_helm
from tests.component.chart.custom import DEFINITIONS

SPECS = {definition.resource: definition.strict_spec() for definition in DEFINITIONS}


@pytest.fixture(autouse=True)
def _helm() -> None:
    require_helm()


def custom_of(name: str) -> list[Manifest]:
    return [item for item in example(name) if (item["apiVersion"], item["kind"]) in CUSTOM]


def check(item: Manifest) -> None:
    jsonschema.validate(item["spec"], SPECS[item["apiVersion"], item["kind"]])


def test_every_custom_resource_has_only_fields_of_its_definition() -> None:
    found = [item for path in EXAMPLES for item in custom_of(path.stem)]
    for item in found:
        check(item)
    # Each definition is of use.
    assert {(item["apiVersion"], item["kind"]) for item in found} == CUSTOM


@pytest.mark.parametrize(
    "name,kind,path,value",
    [
        ("tokens", "ServiceMonitor", ("selectors",), {}),
        ("tokens", "ServiceMonitor", ("endpoints", 0, "interval"), "15"),
        ("tls", "ServiceMonitor", ("endpoints", 0, "tlsConfig", "ca", "secret", "file"), "ca.crt"),
        ("tokens", "PrometheusRule", ("groups", 0, "rules", 0, "expr"), ["up"]),
        ("keda", "ScaledObject", ("triggers", 0, "metadata", "threshold"), 4),
        ("keda", "ScaledObject", ("maxReplicaCount",), 0),
        ("gateway", "InferencePool", ("endpointPickerRef", "failureMode"), "Open"),
        ("gateway", "InferencePool", ("targetPortNumber",), 8000),
        ("tls", "Certificate", ("privateKey", "algorithm"), "EC"),
    ],
)
def test_a_wrong_field_of_a_custom_resource_is_found(
    name: str, kind: str, path: tuple[str | int, ...], value: Any
) -> None:
    item = copy.deepcopy(next(item for item in custom_of(name) if item["kind"] == kind))
    *parents, last = path
    at: Any = item["spec"]
    for step in parents:
        at = at[step]
    at[last] = value
    with pytest.raises(jsonschema.ValidationError):
        check(item)
