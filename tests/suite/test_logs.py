"""The logs of all services: JSON on request, with traces, and without lines of libraries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headrace.inference.v1 import inference_pb2
from tests.suite.deployment import prompt_of, suite

REMOTE = inference_pb2.PREFILL_PLACEMENT_REMOTE
ROLES = ("registry", "router", "prefill", "decode")


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """Every line of every service's log. Fails for a line that is not JSON."""
    files = [path for path in folder.rglob("*.log") if path.name != "console.log"]
    assert len(files) == len(ROLES)
    return [
        json.loads(line) for path in files for line in path.read_text("utf-8").splitlines() if line
    ]


async def test_a_healthy_run_logs_nothing_but_its_own_information(tmp_path: Path) -> None:
    settings = [
        *((role, "log_format", "json") for role in ROLES),
        # The level of the lines about single transfers.
        ("decode", "log_level", "debug"),
    ]
    async with suite(tmp_path, spawning=None, settings=settings) as it:
        outcomes = [
            await it.generate(prompt_of(40, number), 6, placement=REMOTE) for number in range(3)
        ]
    lines = lines_of(tmp_path)
    assert {line["service"].removeprefix("headrace-") for line in lines} == set(ROLES)
    assert not [line for line in lines if line["level"] not in ("INFO", "DEBUG")]
    about_transfers = [line for line in lines if line["message"].startswith("transfer x")]
    assert {line.get("trace_id") for line in about_transfers} == {
        outcome.trace_id for outcome in outcomes
    }
