"""`headrace simulate`: a table or a document, equal in every process, and what is wrong with the input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from headrace_cli.app import app
from headrace_simulator.settings import Way
from tests.unit.simulator.samples import PROFILE

TRACE = Path(__file__).parents[4] / "bench" / "simulation" / "conversation.jsonl"


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    path.write_text(PROFILE.model_copy(update={"kv_tokens": 200_000}).model_dump_json())
    return path


def simulate(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["simulate", *map(str, arguments)])


def test_every_placement_has_a_row_and_the_document_has_the_same(profile: Path) -> None:
    given = (
        "--trace",
        TRACE,
        "--profile",
        profile,
        "--seconds",
        120,
        "--prefill",
        2,
        "--decode",
        2,
    )
    table = simulate(*given)
    assert table.exit_code == 0, table.output
    document = simulate(*given, "--json")
    assert document.exit_code == 0, document.output
    record = json.loads(document.stdout)
    assert [run["way"] for run in record["runs"]] == list(Way)
    lines = table.stdout.splitlines()
    for run in record["runs"]:
        (row,) = [line for line in lines if line.split("  ")[0].strip() == run["way"]]
        assert f"{run['attainment']:.1%}" in row
        assert f"{run['cached_share']:.1%}" in row
        assert run["requests"] > 10


def test_a_trace_with_several_classes_has_a_row_for_each(profile: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    fields = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": []}
    lines = [{**fields, "priority": name} for name in ("low", "high") * 5]
    trace.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    given = ("--trace", trace, "--profile", profile, "--placement", "KV-aware")
    table = simulate(*given)
    assert table.exit_code == 0, table.output
    (run,) = json.loads(simulate(*given, "--json").stdout)["runs"]
    assert [(one["priority"], one["requests"]) for one in run["classes"]] == [
        *(("high", 5), ("low", 5)),
    ]
    high, low = run["classes"]
    assert high["ttft"]["percentiles"]["p50"] < low["ttft"]["percentiles"]["p50"]
    for one in run["classes"]:
        (row,) = [line for line in table.stdout.splitlines() if f" {one['priority']} " in line]
        assert f"{one['attainment']:.1%}" in row
        assert f"{1e3 * one['ttft']['percentiles']['p50']:.0f} ms" in row


def test_the_planner_changes_the_workers(profile: Path) -> None:
    result = simulate(
        *("--trace", TRACE, "--profile", profile, "--seconds", 300, "--planner", "--json"),
        *("--placement", "KV-aware", "--ttft", 1.0),
    )
    assert result.exit_code == 0, result.output
    (run,) = json.loads(result.stdout)["runs"]
    assert run["scaling"] == "planner"
    assert max(change["prefill_workers"] for change in run["changes"]) > 1


def test_workers_of_both_roles_take_the_place_of_the_others(profile: Path) -> None:
    given = ("--trace", TRACE, "--profile", profile, "--seconds", 120, "--workers", 2)
    result = simulate(*given, "--placement", "KV-aware", "--json")
    assert result.exit_code == 0, result.output
    (run,) = json.loads(result.stdout)["runs"]
    assert run["both_worker_hours"] == pytest.approx(2 * run["duration_s"] / 3600)
    assert run["prefill_worker_hours"] == run["decode_worker_hours"] == 0


def test_a_profile_without_sizes_is_refused(profile: Path) -> None:
    profile.write_text(PROFILE.model_copy(update={"kv_tokens": 0}).model_dump_json())
    result = simulate("--trace", TRACE, "--profile", profile, "--seconds", 10)
    assert result.exit_code == 2
    assert "kv_tokens" in result.output
