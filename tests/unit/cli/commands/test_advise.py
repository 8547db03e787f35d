"""`headrace advise`: a table, a choice, and what starts it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml
from jsonschema import Draft202012Validator
from typer.testing import CliRunner, Result

from headrace_cli.app import app
from headrace_cli.up.topology import parse_setting
from headrace_engine.config import EngineConfig
from headrace_simulator.accelerators import ACCELERATORS
from tests.unit.kv.test_model_layout import CONFIGS, ROOT
from tests.unit.simulator.samples import PROFILE

GIVEN = (
    *("--model", CONFIGS / "qwen3-8b.json", "--accelerator", "l40s", "--devices", 2),
    *("--prompt-tokens", "3000,2000", "--answer-tokens", 150, "--rate", 1.5),
)


def advise(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["advise", *map(str, arguments)])


def test_what_is_proposed_starts() -> None:
    answer = advise(*GIVEN, "--ttft", 3, "--tpot", 0.045, "--tensor-parallel-size", 1, "--json")
    assert answer.exit_code == 0, answer.output
    document = json.loads(answer.stdout)
    best, (up, policy, *helm) = document["best"], document["start"]
    assert (best["is_plain"], best["ranks"]) == (False, 1)
    program, command, *options = shlex.split(up)
    assert program == "headrace"
    root: Any = typer.main.get_command(app)
    context = root.commands[command].make_context(command, options)
    assert "max_model_len" in up
    assert context.params["prefill"] == (best["prefill"] or None)
    assert context.params["devices"] == "0,1"
    for setting in context.params["settings"]:
        _, name, _ = parse_setting(setting)
        assert name in EngineConfig.__dataclass_fields__
    assert policy == "headrace policy set ttft_target=3s tpot_target=0.045s"
    chart = ROOT / "docker" / "helm" / "headrace"
    values = yaml.safe_load((chart / "values.yaml").read_text())
    values |= yaml.safe_load("\n".join(helm))
    schema = json.loads((chart / "values.schema.json").read_text())
    assert not list(Draft202012Validator(schema).iter_errors(values))
    assert values["decode"]["replicas"] == best["decode"]


def test_workers_on_several_machines_are_started_by_the_chart(tmp_path: Path) -> None:
    device = tmp_path / "one.json"
    figures = ACCELERATORS["L40S"].model_copy(update={"machine_devices": 1})
    device.write_text(figures.model_dump_json())
    answer = advise(*GIVEN, "--ttft", 3, "--tpot", 0.045, "--accelerator", device, "--json")
    first, *others = json.loads(answer.stdout)["start"]
    assert "several machines of 1 devices" in first
    assert not [line for line in others if "headrace up" in line]


def test_the_table_shows_the_choice_with_its_reason_and_a_measured_profile(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    measured = {"kv_tokens": 200_000, "measured": "by a test"}
    path.write_text(PROFILE.model_copy(update=measured).model_dump_json())
    answer = advise(
        *GIVEN, "--ttft", 1, "--tpot", 0.001, "--profile", path, "--tensor-parallel-size", 2
    )
    assert answer.exit_code == 0, answer.output
    assert "1 plain" in answer.stdout
    assert "No way keeps the bounds" in answer.stdout
    assert "Times of workers: by a test." in answer.stdout
    assert "421.2 MiB and takes 39.3 ms" in answer.stdout


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("--ttft", "inf"), "--ttft"),
        (("--tensor-parallel-size", 4), "--tensor-parallel-size 4 does not start"),
        (("--accelerator", "TPU"), "name a JSON file, or H100"),
        (("--model", CONFIGS / "deepseek-v3.json"), "its weights have 671 GB"),
        (("--prompt-tokens", 50_000), "of context"),
        (("--trace", "/none.jsonl"), "'/none.jsonl' does not exist"),
        (("--rate", 0), "give --trace FILE, or --prompt-tokens"),
        (("--profile", "none.json"), "none.json cannot be read"),
    ],
)
def test_wrong_input_is_refused_by_its_name(arguments: tuple[object, ...], what: str) -> None:
    answer = advise(*GIVEN, "--ttft", 1, "--tpot", 0.1, *arguments)
    assert answer.exit_code == 2
    assert what in answer.output
