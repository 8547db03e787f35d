"""The custom resources of the chart have the fields of their definitions, and no others."""

from __future__ import annotations

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
