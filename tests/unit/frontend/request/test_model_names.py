"""Clients select a model by its name, and an adapter by its name or beside its model."""

from __future__ import annotations

import pytest

from headrace_common.errors import InvalidRequest
from headrace_common.registry.adapters import Adapter
from headrace_frontend.request.model_names import ModelChoice, resolve_model

POET, CODER = Adapter("poet", "aa"), Adapter("coder", "bb")
OTHER_POET = Adapter("poet", "cc")
ADAPTERS = {"large": {"poet": POET, "coder": CODER}, "small": {"poet": OTHER_POET}}
MODELS = ("large", "small")


def test_the_only_model_needs_no_name() -> None:
    assert resolve_model("", ["large"], ADAPTERS, "coder") == ModelChoice("large", CODER)
    assert resolve_model("", ["large"], ADAPTERS) == ModelChoice("large")


def test_a_model_has_precedence_over_an_adapter_of_its_name() -> None:
    adapters = {"large": {"small": POET}}
    assert resolve_model("small", MODELS, adapters) == ModelChoice("small")
    assert resolve_model("large", MODELS, adapters, "small") == ModelChoice("large", POET)


@pytest.mark.parametrize(
    ("name", "adapter", "field", "remedy"),
    [
        ("painter", "", "model", "'painter' is not served; use one of: large, small, coder, poet"),
        ("poet", "", "model", "an adapter of several models (large, small)"),
        ("coder", "poet", "adapter", "must be empty"),
        (
            "small",
            "coder",
            "adapter",
            "no live worker of small has adapter 'coder'; use one of: poet",
        ),
        ("", "poet", "model", "must be set"),
    ],
)
def test_an_unknown_name_is_refused_with_the_known_ones(
    name: str, adapter: str, field: str, remedy: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        resolve_model(name, MODELS, ADAPTERS, adapter)
    assert list(caught.value.violations) == [field]
    assert remedy in caught.value.violations[field]


def test_a_model_without_adapters_says_so() -> None:
    with pytest.raises(
        InvalidRequest, match="no live worker of large has adapter 'poet'; leave it out"
    ):
        resolve_model("large", MODELS, {}, "poet")
