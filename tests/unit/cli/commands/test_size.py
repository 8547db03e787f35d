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
        (("--load", "20,2000"), "--load"),
        (("--load", "20,2000,300,4"), "--load"),
        (("--load", "nan,2000,300"), "--load"),
        (("--load", "20,2000,0"), "--load"),
        (("--load", "20,2000,300"), "--decode-rate"),
        (("--load", "20,2000,300", "--compute-rate", "1"), "--decode-rate"),
    ],
)
def test_wrong_arguments_are_named(model: Path, arguments: tuple[str, ...], named: str) -> None:
    result = run(model, *arguments)
    assert result.exit_code == 2
    assert named in result.output


def test_a_load_needs_workers_by_the_formula(model: Path) -> None:
    arguments = (model, "--load", "20,2000,300", "--compute-rate", 20_000, "--decode-rate", 3_000)
    prefill, decode = document(*arguments)["workers"]
    # 40,000 prompt tokens a second of 0.8 x 20,000, and 6,000 answer tokens of 0.8 x 3,000.
    assert (prefill["role"], prefill["count"], prefill["limit"]) == ("prefill", 3, "compute")
    assert (decode["role"], decode["count"], decode["limit"]) == ("decode", 3, "compute")
    assert prefill["share"] == pytest.approx(40_000 / 3 / 20_000)
    assert decode["share"] == pytest.approx(6_000 / 3 / 3_000)
    shown = " ".join(run(*arguments).output.split())
    assert "prefill: 3 workers, each with 67% of computing in use" in shown
    assert document(model)["workers"] == []


def test_a_narrow_link_needs_more_workers_of_both_roles(model: Path) -> None:
    found = document(
        *(model, "--load", "20,2000,300", "--compute-rate", 20_000, "--decode-rate", 3_000),
        *("--gbit", 10),
    )
    # 40,000 tokens a second of 70,272 bytes over 0.9 x 10 Gbit/s.
    used = 40_000 * 70_272 * 8 / (0.9 * 10e9)
    for workers in found["workers"]:
        assert (workers["count"], workers["limit"]) == (4, "link")
        assert workers["share"] == pytest.approx(used / 4)


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    result = run(tmp_path / "absent")
    assert result.exit_code == 2
    assert "absent" in "".join(result.output.split())


def test_a_wrong_hub_id_is_named() -> None:
    result = run("hf:nothing")
    assert result.exit_code == 2
    assert "hf:OWNER/NAME" in result.output
