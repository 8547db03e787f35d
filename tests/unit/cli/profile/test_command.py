"""Which deployments `headrace profile` measures."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.registry.v1 import registry_pb2
from headrace.worker.v1 import worker_pb2
from headrace_cli.app import app
from headrace_cli.commands import profile
from headrace_cli.commands.profile import WorkerSize
from headrace_common.errors import ConfigError, InternalError

_Role = registry_pb2.Member.Role
PREFILL, DECODE = _Role.ROLE_PREFILL, _Role.ROLE_DECODE


def member(role: _Role.ValueType, model: str = "small") -> registry_pb2.Member:
    found = registry_pb2.Member(
        worker_id=f"{model}-{role}", role=role, model=model, max_model_len=2_048, max_num_seqs=8
    )
    found.layout.groups.add(block_tokens=16)
    return found


def deployment(
    monkeypatch: pytest.MonkeyPatch, *members: registry_pb2.Member, total_blocks: int = 100
) -> None:
    async def list_members(registry: str) -> list[registry_pb2.Member]:
        return list(members)

    async def worker_status(endpoint: str) -> worker_pb2.WatchStatusResponse:
        return worker_pb2.WatchStatusResponse(total_blocks=total_blocks)

    monkeypatch.setattr(profile, "list_members", list_members)
    monkeypatch.setattr(profile, "worker_status", worker_status)


async def test_the_size_is_that_of_the_decode_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    deployment(monkeypatch, member(PREFILL), member(DECODE), member(DECODE, "other"))
    assert await profile.worker_size("registry", "small") == WorkerSize("small", 2_048, 8, 1_600)


@pytest.mark.parametrize(
    "members",
    [
        (member(DECODE),),
        (member(PREFILL), member(DECODE), member(DECODE)),
        (member(PREFILL), member(DECODE), member(PREFILL, "other"), member(DECODE, "other")),
    ],
)
async def test_one_worker_of_each_role_is_measured(
    monkeypatch: pytest.MonkeyPatch, members: tuple[registry_pb2.Member, ...]
) -> None:
    deployment(monkeypatch, *members)
    with pytest.raises(ConfigError, match="a profile is that of one each"):
        await profile.worker_size("registry", "")


async def test_a_worker_without_a_size_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    deployment(monkeypatch, member(PREFILL), member(DECODE), total_blocks=0)
    with pytest.raises(InternalError, match="small-3 does not report"):
        await profile.worker_size("registry", "")


def test_the_folder_of_the_output_must_exist(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["profile", "--output", str(tmp_path / "none" / "p.json")])
    assert result.exit_code == 2
    assert "its folder does not exist" in result.output
