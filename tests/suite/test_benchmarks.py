"""Every benchmark without vLLM and without a peer, at its smallest size: the report has its tables and figures."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final
from xml.etree import ElementTree as ET

import pytest

from tests.fork_server import SOCKET_VARIABLE, fork_server

ROOT: Final = Path(__file__).resolve().parents[2]
LIMIT_S: Final = 150.0
WITH_ENGINES: Final = {
    *("goodput", "handover", "interference", "layer_wise", "sent_from_host", "tiers"),
}
WITH_PEERS: Final = {"proxy.dynamo", "proxy.dynamo_scale"}
PARTS: Final = {"data_plane.ways", "proxy.workers", "support.vllm_child"}
"""Modules that a benchmark starts as a process."""

Table = list[dict[str, str]]


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


def tables(text: str) -> list[Table]:
    """The Markdown tables of a report, as rows by column."""
    found: list[Table] = []
    for block in re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE):
        head, _, *rows = (
            [cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()
        )
        found.append([dict(zip(head, row, strict=True)) for row in rows])
    return found


def assert_positive(cells: list[str]) -> None:
    """Asserts that the first number in each cell is finite and positive."""
    assert cells
    for cell in cells:
        figure = float(re.split(r"[ %]", cell)[0].replace(",", ""))
        assert math.isfinite(figure), cells
        assert figure > 0, cells


def assert_columns_positive(table: Table, *columns: str) -> None:
    assert_positive([row[column] for row in table for column in columns])


def test_every_benchmark_has_a_test_here_or_needs_engines_or_peers() -> None:
    programs = {
        ".".join(path.relative_to(ROOT / "bench").with_suffix("").parts).removesuffix(".__main__")
        for path in (ROOT / "bench").rglob("*.py")
        if 'if __name__ == "__main__":' in path.read_text()
    }
    tested = set(re.findall(r'\brun\(\s*"([\w.]+)"', Path(__file__).read_text()))
    assert programs == tested | WITH_ENGINES | WITH_PEERS | PARTS


def test_access(tmp_path: Path) -> None:
    (table,) = tables(run("access", "--calls=20", "--rounds=1", f"--output={tmp_path}"))
    assert [row["without roles"] for row in table] == ["plaintext", "plaintext", "TLS", "TLS"]
    assert_columns_positive(table, "CPU a call, µs", "ratio")


def test_data_plane(tmp_path: Path) -> None:
    kinds = ["mooncake", "raw_mooncake", "raw_tcp"]
    columns = {*kinds, "raw_mooncake_packed", "raw_mooncake_staged"}
    size = ("--rounds=1", "--mebibytes=1", "--blocks=16,64", f"--output={tmp_path}")
    best, ratios, medians = tables(run("data_plane", f"--kinds={','.join(kinds)}", *size))
    for table in (best, medians):
        assert [row["block"] for row in table] == ["16 KiB", "64 KiB"]
        assert set(table[0]) == {"block", *columns}
    assert len(ratios[0]) == 3
    seconds = json.loads((tmp_path / "data_plane.json").read_text())
    assert set(seconds[str(16 * 1024)]) == columns
    assert_positive([str(one) for row in seconds.values() for [one] in row.values()])
    assert tables((tmp_path / "data_plane.md").read_text()) == [best, ratios, medians]
    assert ET.parse(tmp_path / "data_plane.svg").getroot().tag.endswith("svg")


def test_transport_costs(tmp_path: Path) -> None:
    runs, few = tables(
        run("transport_costs", "--rounds=1", "--mebibytes=4", f"--output={tmp_path}")
    )
    assert [row["run"] for row in runs][::7] == ["1 KiB", "1024 KiB"]
    assert_columns_positive(runs, "one by one, us a run", "staged, us a run")
    assert [row["runs of 1 KiB"] for row in few] == ["1", "2", "4", "8", "16", "32"]
    assert_columns_positive(few, "one by one, us", "staged, us")
    assert tables((tmp_path / "transport_costs.md").read_text()) == [runs, few]


def test_picker(tmp_path: Path) -> None:
    size = ("--loops=2", "--rounds=1", "--seconds=0.5", "--tokens=2", f"--output={tmp_path}")
    (table,) = tables(run("picker", *size))
    assert [row["prompt tokens"] for row in table] == ["200", "4000"]
    assert_columns_positive(table, "a pick, router CPU ms", "a request, router CPU ms", "picks/s")
    assert tables((tmp_path / "picker.md").read_text()) == [table]


def test_worker_cost(tmp_path: Path) -> None:
    size = ("--streams=2", "--rounds=1", "--seconds=1", "--gap-ms=0", f"--output={tmp_path}")
    (table,) = tables(run("worker_cost", *size))
    assert [row["way"] for row in table] == ["verify on", "verify off"]
    assert_columns_positive(table, "router, CPU ms/request", "prefill", "decode", "requests/s")
    assert tables((tmp_path / "worker_cost.md").read_text()) == [table]


def test_telemetry(tmp_path: Path) -> None:
    size = ("--shapes=small", "--rounds=1", "--seconds=0.5", f"--output={tmp_path}")
    (table,) = tables(run("telemetry", *size))
    assert [row["sampled"] for row in table] == ["0%", "1%", "100%"]
    assert_columns_positive(table, "router, CPU ms/request", "prefill", "decode", "requests/s")
    assert tables((tmp_path / "telemetry.md").read_text()) == [table]


def test_many_streams(tmp_path: Path) -> None:
    size = ("--streams=40", "--tokens=12", "--step-ms=50", f"--output={tmp_path}")
    # It ends with an error when a token is lost, repeated or wrong although a worker is killed.
    (table,) = tables(run("many_streams", *size))
    assert [(row["streams"], row["lost"]) for row in table] == [("40", "0")]
    (row,) = table
    assert float(row["last slow s"]) > float(row["fast readers, median s"])
    assert tables((tmp_path / "many_streams.md").read_text()) == [table]


def test_idle_workers(tmp_path: Path) -> None:
    size = ("--workers=3", "--settle=0", "--seconds=1", f"--output={tmp_path}")
    output = run("idle_workers", *size)
    (table,) = tables((tmp_path / "idle_workers.md").read_text())
    assert [row["idle decode workers"] for row in table] == ["3"]
    assert output.count("this checkout") == 1


def test_slow_readers(tmp_path: Path) -> None:
    size = ("--crowd=8", "--fast=2", "--seconds=0.5", "--rounds=1", "--step-ms=20")
    (table,) = tables(run("slow_readers", *size, f"--output={tmp_path}"))
    assert [row["readers"] for row in table] == [
        "2 fast readers alone",
        "beside 8 fast readers",
        "beside 8 slow readers",
    ]
    assert_columns_positive(table, "gap, p50 ms", "p95 ms", "p99 ms", "longest ms")
    assert tables((tmp_path / "slow_readers.md").read_text()) == [table]


def test_scale(tmp_path: Path) -> None:
    # It ends with an error when an answer is wrong.
    size = ("--workers=2,4", "--requests=16", "--rounds=1", "--idle=0.5", f"--output={tmp_path}")
    output = run("scale", *size)
    (table,) = tables((tmp_path / "scale.md").read_text())
    assert [row["workers"] for row in table] == ["2", "4"]
    assert_columns_positive(table, "start, s", "requests/s", "bytes of the start", "router, MiB")
    assert "| 4 | " in output


def test_planner() -> None:
    head, *rows, verdict = run("planner", "--tokens=1024", "--rounds=1").splitlines()[1:]
    assert head.split()[:2] == ["case", "fragments"]
    assert len(rows) == 12
    assert_positive([cell for row in rows for cell in row[32:].split()])
    assert "8 to 4: the dearest plan costs" in verdict


def test_route() -> None:
    sizes = ("--workers=2,4", "--blocks=8192", "--rounds=1", "--memory-blocks=65536")
    ready, whole, ingest, memory = tables(run("route", *sizes))
    cases = [(row["workers"], row["prompt"]) for row in ready]
    assert len(set(cases)) == 2 * (3 * 3 + 1)
    assert_columns_positive(ready, "ours")
    assert [(row["workers"], row["prompt"]) for row in whole] == cases
    assert_columns_positive(whole, "ours, list", "ours, array")
    assert [row["workers"] for row in ingest] == ["2", "4"]
    assert_columns_positive(ingest, "ours")
    assert_columns_positive(memory[:1], "resident bytes a block", "counted bytes a block")


def test_decision() -> None:
    [table] = tables(run("decision", "--workers=2,4", "--blocks=8192", "--rounds=1"))
    parts = ["whole decision", "hashes and index", "choice"]
    assert [row["µs for"] for row in table] == parts * 4
    assert_columns_positive(table, "2 workers", "4 workers", "growth")


def test_placement(tmp_path: Path) -> None:
    size = ("--rounds=1", "--prefill=1", "--decode=2", "--conversations=2", "--turns=2")
    [table] = tables(run("placement", *size, f"--output={tmp_path}"))
    weights = [f"KV-aware, {weight}" for weight in (1, 2, 4, 8)]
    assert [row["placement"] for row in table] == [*weights, "load only", "round robin"]
    columns = ("hits", "TTFT p50, ms", "TTFT p99, ms", "balance")
    assert_columns_positive(table, *columns)
    assert tables((tmp_path / "placement.md").read_text()) == [table]
    assert ET.parse(tmp_path / "placement.svg").getroot().tag.endswith("svg")


def test_tenant_caches(tmp_path: Path) -> None:
    size = ("--rounds=1", "--tenants=2", "--requests=1,3", "--system-tokens=128")
    [table] = tables(run("tenant_caches", *size, f"--output={tmp_path}"))
    columns = ("requests of a tenant", "prefix cache")
    found = [tuple(row[column] for column in columns) for row in table]
    assert found == [(count, way) for count in ("1", "3") for way in ("shared", "tenant")]
    assert_columns_positive(table, "TTFT p50, ms", "TTFT p99, ms")
    # A tenant's first request finds nothing of its own.
    assert [row["hits"].split()[0] for row in table[1:2]] == ["0.0%"]
    assert_columns_positive(table[3:], "hits")
    assert tables((tmp_path / "tenant_caches.md").read_text()) == [table]


def test_prefix_fetch(tmp_path: Path) -> None:
    size = ("--conversations=1", "--turns=2", "--answer-tokens=32", "--prefill-tokens-per-s=2000")
    [table] = tables(run("prefix_fetch", *size, f"--output={tmp_path}"))
    assert [row["turn"] for row in table] == ["1", "2"]
    assert_columns_positive(table, "computed, ms", "fetched, ms", "fetched / computed")
    assert tables((tmp_path / "prefix_fetch.md").read_text()) == [table]


def test_proxy(tmp_path: Path) -> None:
    page = tmp_path / "proxy.md"
    size = ("--gaps=0", "--streams=1", "--rounds=1", "--vllm-router=", f"--output={page}")
    [table] = tables(run("proxy", *size))
    ours = ["a bare gRPC server", "Headrace, gRPC"]
    ours += ["a bare HTTP server", "Headrace, OpenAI HTTP", "Headrace, sim worker"]
    assert [row["proxy"] for row in table] == ours
    # The CPU time counts in ticks of 10 ms, and a fast router may spend none.
    assert_columns_positive(table, "first token, ms", "tokens/message")
    # A bare server is what "direct" stands for.
    routed = [row for row in table if "bare" not in row["proxy"]]
    assert_columns_positive(routed, "direct, ms")
    assert tables(page.read_text()) == [table]


def test_decode_link(tmp_path: Path) -> None:
    size = ("--gaps=0", "--streams=1", "--rounds=1", f"--output={tmp_path}")
    assert tables(run("decode_link", *size))


def test_fairness(tmp_path: Path) -> None:
    size = ("--seconds=2", "--rounds=1", "--loops=6", "--slots=4", "--answer=10")
    output = run("fairness", *size, f"--output={tmp_path}")
    [table] = tables(output[output.index("| load") :])
    assert [row["load"] for row in table] == ["B alone", "fair shares", "first come"]
    assert_columns_positive(table, "tokens/s of both", "B asked", "B's TTFT p50 s")
    assert re.search(r"With fair shares, B got (\d+) of \1 answers\.", output)
    assert tables((tmp_path / "fairness.md").read_text()) == [table]


def test_overload(tmp_path: Path) -> None:
    output = run(
        "overload", "--seconds=1.5", "--scenario=decode", "--answer=4", f"--output={tmp_path}"
    )
    [table] = tables(output)
    assert [row["load"] for row in table] == ["all the time", "1x", "3x"]
    assert_columns_positive(table, "offered/s")
    assert_columns_positive(table[:1], "goodput/s", "p50 s", "p99 s")
    assert not any("WRONG" in row["other ends"] for row in table)
    assert re.search(r"Goodput at 3x is \d\.\d\d of the peak, at 1x \d\.\d\d\.", output)
    assert tables((tmp_path / "overload.md").read_text()) == [table]


def test_tier_copies(tmp_path: Path) -> None:
    sizes = ("--blocks=4", "--memory-blocks=16", "--rounds=1", f"--output={tmp_path}")
    copies, steps = tables(run("tier_copies", *sizes))
    assert [row["4 blocks, 8 MiB"] for row in copies] == ["to main memory", "to KV memory"]
    assert_columns_positive(copies, "tiers, p50, ms", "one copy, p50, ms", "ratio")
    assert [row["steps of computing"] for row in steps] == ["alone", "beside copies"]
    assert_columns_positive(steps, "p50, ms", "p90, ms", "p50 / alone")
    assert tables((tmp_path / "tier_copies.md").read_text()) == [copies, steps]


def test_security(tmp_path: Path) -> None:
    sizes = ("--rounds=1", "--seconds=0.5", "--streams=2", "--attacks=stops,without_key")
    attacks, costs = tables(run("security", *sizes, f"--output={tmp_path}"))
    rows = ["stops", "stops, elsewhere", "without key", "without key, elsewhere"]
    assert [row["attack"] for row in attacks] == ["quiet", *rows]
    times = ("answers", "TTFT p50, ms", "TTFT p99, ms", "gap p99, ms", "longest gap, ms")
    assert_columns_positive(attacks, *times, "p99 over quiet", "gap p99 over quiet")
    assert_columns_positive(attacks[1:], "calls/s")
    kinds = ["plaintext", "tokens", "TLS", "TLS, roles"]
    assert [row["kind"] for row in costs] == kinds
    assert_columns_positive(costs, "requests/s", "TTFT p50, ms", "TTFT p99, ms")
    assert_columns_positive(costs, "CPU ms a request", "CPU ratio")
    assert tables((tmp_path / "security_bystander.md").read_text()) == [attacks]
    assert tables((tmp_path / "security_cost.md").read_text()) == [costs]


def test_simulated_placements(tmp_path: Path) -> None:
    whole = (ROOT / "bench/simulation/conversation.jsonl").read_text().splitlines(keepends=True)
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(whole[:100]))
    published = (f"--published={trace}", "--seconds=600")
    run("simulation.placements", f"--trace={trace}", *published, f"--output={tmp_path}")
    both = tables((tmp_path / "simulation.md").read_text())
    assert len(both) == 2
    for table in both:
        assert len({row["placement"] for row in table}) == 4
        assert_columns_positive(table, "TTFT p50, p90, p99 s", "ITL p50, p99 ms", "worker-hours")


def test_simulated_day(tmp_path: Path) -> None:
    kept = tmp_path / "day.json"
    size = ("--hours=0.5", "--splits", "3:3", f"--keep={kept}", f"--output={tmp_path}")
    runs, targets = tables(run("simulation.day", "--runs", "planner", "oracle", "fixed", *size))
    assert [row["workers"] for row in runs] == ["planner", "oracle", "3:3 P:D, best"]
    assert len(targets) == 3
    assert set(json.loads(kept.read_text())) == {"planner", "oracle", "3:3"}


def test_traces() -> None:
    lines = run("simulation.make_trace", "conversation", "--seconds=60").splitlines()
    requests = [json.loads(line) for line in lines]
    assert requests
    assert all(request["input_length"] > 0 < request["output_length"] for request in requests)


def test_mass_loss(tmp_path: Path) -> None:
    size = (
        "--workers=15",
        "--processes=5",
        "--requests=60",
        "--rounds=1",
        "--ttl=5",
        "--streams=8",
    )
    # Every request is answered although a fifth of the workers is killed. It has one attempt more than decode workers
    # are lost.
    output = run("mass_loss", *size, f"--output={tmp_path}")
    (table,) = tables((tmp_path / "mass_loss.md").read_text())
    assert [(row["right"], row["lost"]) for row in table] == [("60", "0")], output
    assert_columns_positive(table, "most attempts", "out of the router's list after, s")


def test_registry_members(tmp_path: Path) -> None:
    size = ("--members=40", "--stores=memory", "--leases=20,1", "--ttl=5", "--idle=0.5")
    output = run("registry_members", *size, f"--output={tmp_path}")
    (table,) = tables((tmp_path / "registry_members.md").read_text())
    assert [row["leases of a stream"] for row in table] == ["20", "1"]
    assert_columns_positive(table, "snapshot, bytes", "bytes/member and watcher", "registry, MiB")
    assert all(f"| {row['snapshot, bytes']} |" in output for row in table)


def test_forecast(tmp_path: Path) -> None:
    run("forecast", "--days=2", "--intervals=3600", f"--output={tmp_path}")
    (table,) = tables((tmp_path / "forecast.md").read_text())
    assert {"last value", "local trend", "seasonal"} <= {row["predictor"] for row in table}
    assert_columns_positive(table, "mean error, requests", "beside the best of ours")
