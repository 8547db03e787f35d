"""`headrace planner replay`: decisions for a recording, and what is wrong with a file."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from headrace_cli.app import app
from headrace_planner.observation import read_intervals
from headrace_planner.settings import PlannerSettings, WorkerProfile

PAGE = (Path(__file__).parents[4] / "docs" / "planner.md").read_text(encoding="utf-8")


def line(queued: int, *, requests: int = 0) -> dict[str, Any]:
    sample = {"prefill_workers": 1, "queued_prompts": queued, "decode": [{"kv_usage": 0.6}]}
    content: dict[str, Any] = {"start_unix_s": 0, "duration_s": 30, "samples": [sample]}
    if requests:
        content["requests"] = {
            "request_count": requests,
            "prompt_tokens": 1000,
            "answer_tokens": 100,
            "ttft_s": 0.1,
            "itl_s": 0.01,
            "duration_s": 1.0,
        }
    return content


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    path = tmp_path / "load.jsonl"
    lines = [line(0), line(5), line(5, requests=600)]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return path


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


def replay(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["planner", "replay", *map(str, arguments)])


def test_each_interval_has_a_decision(recording: Path, tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    profile.write_text(blocks("json")[1], encoding="utf-8")
    result = replay(recording, "--profile", profile, "--json")
    assert result.exit_code == 0, result.output
    first, second, third = map(json.loads, result.stdout.splitlines())
    assert first["reasons"] == []
    assert second["target"] == {"prefill": 2, "decode": 1, "both": 0}
    assert third["target"]["prefill"] == 3
    recorded = replay(recording, "--json").stdout.splitlines()[2]
    assert json.loads(recorded)["target"]["prefill"] == 2
    assert [reason["rule"] for reason in third["reasons"]][-2:] == [
        "time to first token",
        "time between tokens",
    ]


def test_settings_bound_the_decision(recording: Path, tmp_path: Path) -> None:
    settings = tmp_path / "planner.toml"
    settings.write_text("[budget]\ndevices_max = 2\n", encoding="utf-8")
    result = replay(recording, "--settings", settings)
    assert result.exit_code == 0, result.output
    assert "0 changes in 3 intervals." in result.stdout


@pytest.mark.parametrize(
    ("option", "content", "words"),
    [
        ("--settings", "[load]\nprefill_up_queue = 0.1\ndecode_up_load = -1", "decode_up_load"),
        ("--settings", "[load]\nprefill_up_queue = 0.1", "must be below prefill_up_queue"),
        ("--settings", "[load", "no valid TOML"),
        ("--profile", '{"steps": {"fixed_s": "slow"}}', "steps.fixed_s"),
        ("--profile", "{", "no valid JSON"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(
    recording: Path, tmp_path: Path, option: str, content: str, words: str
) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text(content, encoding="utf-8")
    result = replay(recording, option, wrong)
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())


def test_the_examples_of_the_page_are_valid() -> None:
    """The settings on the page are the defaults."""
    assert PlannerSettings.model_validate(tomllib.loads(blocks("toml")[0])) == PlannerSettings()
    recorded, profile = blocks("json")
    (interval,) = read_intervals([" ".join(recorded.split())])
    assert interval.requests is not None
    assert WorkerProfile.model_validate_json(profile).steps.knows_prompts
