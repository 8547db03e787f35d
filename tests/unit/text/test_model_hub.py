"""Names of models on a hub."""

from __future__ import annotations

import pytest

from headrace_engine.worker.config import WorkerConfig
from headrace_router.config import RouterConfig
from headrace_text.model_hub import HubModel, parse_hub_model


def test_an_id_may_have_a_revision() -> None:
    assert parse_hub_model("hf:org/some-model_1.5") == HubModel("org/some-model_1.5")
    assert parse_hub_model("hf:org/m@refs/pr/3") == HubModel("org/m", "refs/pr/3")
    # A folder, even one that does not exist, is never looked up on a hub.
    assert parse_hub_model("org/some-model") is None


@pytest.mark.parametrize("text", ["hf:", "hf:m", "hf:a/b/c", "hf:a/b@", "hf:a/b@-x", "hf:a b/c"])
def test_other_forms_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="hf:OWNER/NAME"):
        parse_hub_model(text)
    with pytest.raises(ValueError, match="hf:OWNER/NAME"):
        WorkerConfig.model_validate({"worker_id": "d", "model": text})
    with pytest.raises(ValueError, match="hf:OWNER/NAME"):
        RouterConfig.model_validate({"model": text})


def test_the_served_name_is_the_repository() -> None:
    assert RouterConfig.model_validate({"model": "hf:org/m@v1"}).models == {"org/m": "hf:org/m@v1"}
    assert RouterConfig.model_validate({"model": "x=hf:org/m"}).models == {"x": "hf:org/m"}
