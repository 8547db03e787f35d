"""Every benchmark without vLLM and without a peer, at its smallest size: it ends well, and its tables have figures."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.fork_server import SOCKET_VARIABLE, fork_server

pytestmark = pytest.mark.in_turn

ROOT: Final = Path(__file__).resolve().parents[2]
LIMIT_S: Final = 150.0
TRACE: Final = "bench/simulation/conversation.jsonl"
WITHOUT_OUTPUT: Final = {
    "route": "--workers=2,4 --blocks=8192 --rounds=1 --memory-blocks=65536",
    "simulation.make_trace": "conversation --seconds=60",
}
WITH_OUTPUT: Final = {
    "data_plane": "--rounds=1 --mebibytes=1 --blocks=16,64 --kinds=mooncake,raw_mooncake,raw_tcp",
    "transport_costs": "--rounds=1 --mebibytes=4",
    "picker": "--loops=2 --rounds=1 --seconds=0.5 --tokens=2",
    "telemetry": "--shapes=small --rounds=1 --seconds=0.5",
    "scale": "--workers=2,4 --requests=16 --rounds=1 --idle=0.5",
    "placement": "--rounds=1 --prefill=1 --decode=2 --conversations=2 --turns=2",
    "prefix_fetch": "--conversations=1 --turns=2 --answer-tokens=32 --prefill-tokens-per-s=2000",
    "proxy": "--gaps=0 --streams=1 --rounds=1 --vllm-router=",
    "fairness": "--seconds=2 --rounds=1 --loops=6 --slots=4 --answer=10",
    "overload": "--seconds=1.5 --scenario=decode --answer=4",
    "tier_copies": "--blocks=4 --memory-blocks=16 --rounds=1",
    "security": "--rounds=1 --seconds=0.5 --streams=2 --attacks=stops,without_key",
    "simulation.placements": f"--trace={TRACE} --published={TRACE} --seconds=600",
    "simulation.regret": "--sample=1",
    "simulation.day": "--hours=0.5 --splits 3:3 --runs planner oracle fixed",
    "registry_members": "--members=40 --stores=memory --leases=20,1 --ttl=5 --idle=0.5",
}
MASS_LOSS: Final = "--workers=15 --processes=5 --requests=60 --rounds=1 --ttl=5 --streams=8"


def run(name: str, *arguments: str) -> str:
    """The standard output of a benchmark. Its processes end with it, or at the limit."""
    process = subprocess.Popen(
        [sys.executable, "-m", f"bench.{name}", *arguments],
        cwd=ROOT,
        env={**os.environ, SOCKET_VARIABLE: str(fork_server("sim"))},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        _, errors = process.communicate()
        pytest.fail(f"bench.{name} did not end within {LIMIT_S:g} s:\n{errors}")
    assert process.returncode == 0, errors
    return output


def rows_of(text: str) -> list[dict[str, str]]:
    """The rows of all Markdown tables of a report, by column."""
    rows = []
    for block in re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE):
        head, _, *cells = (
            [cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()
        )
        rows += [dict(zip(head, row, strict=True)) for row in cells]
    return rows


@pytest.mark.parametrize("name", WITHOUT_OUTPUT)
def test_a_benchmark_prints_figures(name: str) -> None:
    assert re.search(r"[1-9]", run(name, *WITHOUT_OUTPUT[name].split()))


@pytest.mark.parametrize("name", WITH_OUTPUT)
def test_a_benchmark_writes_its_tables(name: str, tmp_path: Path) -> None:
    # The proxy's output is a file, and the others' a folder.
    output = tmp_path / "proxy.md" if name == "proxy" else tmp_path
    run(name, *WITH_OUTPUT[name].split(), f"--output={output}")
    pages = [page.read_text() for page in tmp_path.glob("*.md")]
    assert pages
    for page in pages:
        rows = rows_of(page)
        assert rows
        assert all(re.search(r"\d", " ".join(row.values())) for row in rows), rows
        assert not any("nan" in row.values() or "WRONG" in str(row) for row in rows)


def test_mass_loss(tmp_path: Path) -> None:
    # Every request is answered although a fifth of the workers is killed. It has one attempt more than decode workers
    # are lost.
    output = run("mass_loss", *MASS_LOSS.split(), f"--output={tmp_path}")
    [row] = rows_of((tmp_path / "mass_loss.md").read_text())
    assert (row["right"], row["lost"]) == ("60", "0"), output
