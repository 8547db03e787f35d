"""Changes as `headrace policy set` parses them."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from headrace.registry.v1 import registry_pb2
from headrace_cli.commands.policy import _show, apply_change, policy_table
from headrace_common.errors import ConfigError


def _changed(*changes: str) -> registry_pb2.Policy:
    policy = registry_pb2.Policy(local_prefill_max_tokens=7, retry_budget=1)
    for change in changes:
        apply_change(policy, change)
    return policy


def test_an_empty_value_restores_the_default() -> None:
    policy = _changed("overlap_weight=2", "overlap_weight=", "retry_budget=")
    assert not policy.HasField("overlap_weight")
    assert not policy.HasField("retry_budget")
    assert _changed("max_queue_wait=1.5", "max_queue_wait=2s").max_queue_wait.ToSeconds() == 2


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
    cells = list(map(str, policy_table(granted, Console()).columns[1].cells))
    assert "batch=low, chat=high" in cells
    roles = _changed("worker_roles.w0.rack-1=prefill", "worker_roles.w1=decode", "worker_roles.w1=")
    assert dict(roles.worker_roles) == {"w0.rack-1": registry_pb2.WORKER_ROLE_PREFILL}
    assert "w0.rack-1=prefill" in map(str, policy_table(roles, Console()).columns[1].cells)
    with pytest.raises(ConfigError, match="high or normal or low"):
        _changed("tenant_priorities.chat=first")


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        ("temperture=1", "one of local_prefill_max_tokens"),
        ("temperature", "FIELD=VALUE"),
        ("temperature=warm", "give a number"),
        ("retry_budget=1.5", "give a whole number from 0"),
        ("retry_budget=-1", "give a whole number from 0"),
        ("temperature.x=1", "write temperature=VALUE"),
        ("tenant_weights=1", "write tenant_weights.NAME=VALUE"),
        ("max_queue_wait=long", "give seconds"),
        ("max_queue_wait=nan", "give seconds"),
    ],
)
def test_an_invalid_change_is_rejected_with_a_remedy(change: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy):
        _changed(change)
