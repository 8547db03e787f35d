"""`headrace size`: bytes and times by prompt length."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from headrace_cli.app import app

DEEPSEEK_V3 = {
    "num_hidden_layers": 61,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3), encoding="utf-8")
    return tmp_path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["size", *map(str, arguments)])


def document(*arguments: object) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_the_table_of_deepseek_v3(model: Path) -> None:
    text = run(model, "--gbit", 100).output
    assert "67.02 MiB" in text
    for row in ("134.03 MiB 12.49 ms", "1,072.27 MiB 99.94 ms", "4,289.06 MiB 399.77 ms"):
        assert row in " ".join(text.split())
    assert "8,578.13 MiB 799.54 ms" in " ".join(text.split())
    assert "70,272 bytes a token" in text


@pytest.mark.parametrize(
    "content,named",
    [
        ("[]", "not an object"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("{}", "num_hidden_layers"),
        (json.dumps({**DEEPSEEK_V3, "qk_rope_head_dim": -1}), "qk_rope_head_dim"),
        ('"' + "x" * (1 << 20) + '"', "more than"),
    ],
)
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, content: str, named: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(content, encoding="utf-8")
    result = run(path)
    assert result.exit_code == 2
    assert named in " ".join(result.output.split())


@pytest.mark.parametrize(
    "arguments,named",
    [
        (("--tokens", "0"), "--tokens"),
        (("--tokens", "1e3"), "--tokens"),
        (("--tokens", "9" * 5_000), "--tokens"),
        (("--tokens", ",".join(["1"] * 65)), "at most 64"),
        (("--dtype", "int3"), "int3"),
        (("--gbit", "0"), "--gbit"),
    ],
)
def test_wrong_arguments_are_named(model: Path, arguments: tuple[str, ...], named: str) -> None:
    result = run(model, *arguments)
    assert result.exit_code == 2
    assert named in result.output


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    result = run(tmp_path / "absent")
    assert result.exit_code == 2
    assert "absent" in "".join(result.output.split())


def test_a_wrong_hub_id_is_named() -> None:
    result = run("hf:nothing")
    assert result.exit_code == 2
    assert "hf:OWNER/NAME" in result.output
