"""Changes as `headrace policy set` parses them."""

from __future__ import annotations

import json

import pytest

from headrace.inference.v1 import first_token_pb2
from headrace.registry.v1 import registry_pb2
from headrace_cli.commands.policy import _show, apply_change, policy_table
from headrace_common.errors import ConfigError


def _changed(*changes: str) -> registry_pb2.Policy:
    policy = registry_pb2.Policy(local_prefill_max_tokens=7, retry_budget=1)
    for change in changes:
        apply_change(policy, change)
    return policy


def _shown(policy: registry_pb2.Policy) -> dict[str, str]:
    """The values of the table by field."""
    names, values = policy_table(policy).columns
    return dict(zip(map(str, names.cells), map(str, values.cells), strict=True))


def test_only_the_named_fields_change() -> None:
    policy = _changed("local_prefill_max_tokens=256", "temperature=0.25")
    assert policy == registry_pb2.Policy(
        local_prefill_max_tokens=256, retry_budget=1, temperature=0.25
    )


@pytest.mark.parametrize("text", ["2", "2s", " 2.0 s", "2.0s"])
def test_a_duration_is_given_in_seconds(text: str) -> None:
    assert _changed(f"max_queue_wait={text}").max_queue_wait.ToMilliseconds() == 2_000


def test_an_empty_value_restores_the_default() -> None:
    policy = _changed("overlap_weight=2", "overlap_weight=", "retry_budget=")
    assert not policy.HasField("overlap_weight")
    assert not policy.HasField("retry_budget")


def test_an_enum_value_is_given_by_its_short_name() -> None:
    prefill = first_token_pb2.FIRST_TOKEN_POLICY_PREFILL
    assert _changed("first_token=prefill").first_token == prefill
    assert _changed("first_token=PREFILL", "first_token=").first_token == 0
    with pytest.raises(ConfigError, match="decode or prefill"):
        _changed("first_token=both")
    assert _shown(_changed("first_token=decode"))["first_token"] == "decode"
    assert _shown(registry_pb2.Policy())["first_token"] == "-"


def test_a_target_is_set_in_seconds_and_removed() -> None:
    policy = _changed("ttft_target=1.5s")
    assert policy.ttft_target.ToMilliseconds() == 1_500
    assert _shown(policy)["ttft_target"] == "1.500s"
    assert not _changed("ttft_target=1.5s", "ttft_target=").HasField("ttft_target")


def test_pairs_of_places_are_set_and_shown() -> None:
    policy = _changed("pair_level=rack", "pair_rule=require", "far_weight=2")
    assert (policy.pair_level, policy.pair_rule, policy.far_weight) == (2, 2, 2.0)
    assert _shown(policy)["pair_level"] == "rack"


def test_programs_get_what_is_set(capsys: pytest.CaptureFixture[str]) -> None:
    policy = _changed("pair_level=rack", "max_queue_wait=1.5s")
    _show(registry_pb2.GetPolicyResponse(policy=policy, revision=3), as_json=True)
    printed = json.loads(capsys.readouterr().out)
    # Protobuf's JSON has 64-bit integers as text.
    assert printed["revision"] == "3"
    assert printed["policy"]["max_queue_wait"] == "1.500s"
    assert printed["policy"]["pair_level"].endswith("_RACK")
    assert "far_weight" not in printed["policy"]


def test_a_map_is_changed_by_entry() -> None:
    policy = _changed("tenant_weights.batch=0.5", "tenant_weights.chat=3", "tenant_weights.batch=")
    assert dict(policy.tenant_weights) == {"chat": 3.0}
    granted = _changed("tenant_priorities.chat=HIGH", "tenant_priorities.batch=low")
    assert dict(granted.tenant_priorities) == {"chat": 1, "batch": 3}
    cells = list(policy_table(granted).columns[1].cells)
    assert "batch=low, chat=high" in cells
    with pytest.raises(ConfigError, match="high or normal or low"):
        _changed("tenant_priorities.chat=first")


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        ("temperture=1", "one of local_prefill_max_tokens"),
        ("temperature", "FIELD=VALUE"),
        ("temperature=warm", "give a number"),
        ("retry_budget=1.5", "give a whole number"),
        ("retry_budget=-1", "does not fit"),
        ("temperature.x=1", "write temperature=VALUE"),
        ("tenant_weights=1", "write tenant_weights.NAME=VALUE"),
        ("max_queue_wait=long", "give a number"),
        ("max_queue_wait=nan", "give a number"),
        ("max_queue_wait=-1s", "give 0 or more"),
    ],
)
def test_an_invalid_change_is_rejected_with_a_remedy(change: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy):
        _changed(change)
