"""`headrace simulate`: a table or a document."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from headrace_cli.app import app
from headrace_simulator.settings import POOL_WAYS
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
    numbers = ("--seconds", 120, "--prefill", 2, "--decode", 2)
    given = ("--trace", TRACE, "--profile", profile, *numbers)
    for wrong in (("--ttft", "inf"), ("--placement", "plain engines")):
        refused = simulate(*given, *wrong)
        assert refused.exit_code == 2
        assert wrong[0] in refused.output
    table = simulate(*given)
    assert table.exit_code == 0, table.output
    document = simulate(*given, "--json")
    assert document.exit_code == 0, document.output
    record = json.loads(document.stdout)
    assert [run["way"] for run in record["runs"]] == list(POOL_WAYS)
    assert "Goals: TTFT 0.5 s and ITL 0.05 s at most" in table.stdout
    lines = table.stdout.splitlines()
    for run in record["runs"]:
        (row,) = [line for line in lines if line.split("  ")[0].strip() == run["way"]]
        assert f"{run['attainment']:.1%}" in row
        assert f"{run['cached_share']:.1%}" in row
        assert run["requests"] > 10
