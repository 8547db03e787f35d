"""`headrace profile`: the mean of what the workers of a model have learned, and their size."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import AsyncMock

import pytest
from typer.testing import CliRunner

from headrace.registry.v1 import registry_pb2
from headrace.worker.v1 import time_model_pb2, worker_pb2
from headrace_cli.app import app
from headrace_cli.commands import profile
from headrace_cli.commands.profile import profile_of
from headrace_kv.layout import KvLayout, layout_to_proto
from headrace_planner.settings import WorkerProfile

_Role = registry_pb2.Member.Role
PREFILL, DECODE, BOTH = _Role.ROLE_PREFILL, _Role.ROLE_DECODE, _Role.ROLE_BOTH
LAYOUT = KvLayout.attention(
    model="small",
    dtype="bfloat16",
    layer_count=2,
    kv_head_count=4,
    block_tokens=16,
    parts={"k": 64, "v": 64},
)


def member(role: _Role.ValueType, model: str = "small") -> registry_pb2.Member:
    return registry_pb2.Member(
        worker_id=f"{model}-{role}",
        role=role,
        model=model,
        max_num_seqs=8,
        layout=layout_to_proto(LAYOUT),
        endpoint=f"{model}-{role}:1",
    )


def status(
    *, prompts: int = 0, answers: int = 0, fixed_s: float = 0.01
) -> worker_pb2.WatchStatusResponse:
    steps = time_model_pb2.StepTimes(
        fixed_s=fixed_s,
        s_per_prompt_token=1e-4 if prompts else 0.0,
        s_per_answer=1e-3 if answers else 0.0,
        prompt_steps=prompts,
        answer_steps=answers,
    )
    times = time_model_pb2.TimeModel(steps=steps)
    return worker_pb2.WatchStatusResponse(total_blocks=100, times=times)


def test_two_pools_and_workers_of_both_roles_have_a_profile() -> None:
    pools = [member(PREFILL), member(DECODE)]
    apart = profile_of(pools, [status(prompts=9, fixed_s=0.03), status(answers=7)])
    assert apart.prompt_s(1_000) == pytest.approx(0.13)
    assert apart.step_s(2, 100) == pytest.approx(0.012)
    assert (apart.kv_tokens, apart.max_num_seqs) == (1_600, 8)
    assert apart.kv_bytes_per_token == round(LAYOUT.token_bytes) > 0
    times = [status(prompts=9, answers=9, fixed_s=each) for each in (0.01, 0.03)]
    both = profile_of([member(BOTH)] * 2, times)
    assert both.steps.fixed_s == pytest.approx(0.02)
    assert "the mean of 2 workers, from 9 steps with prompts" in both.measured


def test_the_workers_of_one_model_are_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    known = status(prompts=9, answers=9)
    members = [member(_Role.ROLE_ROUTER, ""), member(BOTH), member(BOTH, "other")]
    monkeypatch.setattr(profile, "registry_of", AsyncMock(return_value="registry"))
    monkeypatch.setattr(profile, "list_members", AsyncMock(return_value=members))
    monkeypatch.setattr(profile, "worker_status", AsyncMock(return_value=known))
    output = tmp_path / "profile.json"
    for model in ("", "nope"):
        result = CliRunner().invoke(app, ["profile", "--output", str(output), "--model", model])
        assert result.exit_code == 2
        words = " ".join(result.output.split())
        assert "workers serve other, small: name one of these with --model" in words
    result = CliRunner().invoke(app, ["profile", "--output", str(output), "--model", "small"])
    assert result.exit_code == 0, result.output
    assert "model small" in WorkerProfile.model_validate_json(output.read_text()).measured
    missing = tmp_path / "none" / "profile.json"
    result = CliRunner().invoke(app, ["profile", "--output", str(missing), "--model", "small"])
    assert result.exit_code == 2
    assert "cannot be written" in result.output


def test_a_recording_that_the_router_refuses_leaves_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    output = tmp_path / "load.jsonl"
    output.write_text("earlier")
    monkeypatch.setattr(profile, "find_internal", AsyncMock(return_value="127.0.0.1:1"))
    assert CliRunner().invoke(app, ["record", "--output", str(output)]).exit_code == 1
    assert output.read_text() == "earlier"
