"""A real Prometheus scrapes a live deployment and answers the query of every panel and rule."""

from __future__ import annotations

import asyncio
import json
import shutil
import urllib.parse
import urllib.request
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.ports import free_port
from tests.suite.deployment import prompt_of, suite
from tests.unit.docker.test_telemetry import DASHBOARDS, FOLDER, RULES, panels
from tests.waiting import until

KEY = "k" * 32
SERVICES = ("registry", "router", "prefill", "decode")
# Nothing migrates, nothing is refused, and there is no lower tier in this deployment.
EMPTY_PANELS = {
    *("Migrations a second", "Refusals a second", "Blocks in quarantine"),
    *("Prefix hits in lower tiers, blocks a second", "Blocks stored in lower tiers, a second"),
}


def prometheus_file(folder: Path, targets: list[str]) -> Path:
    """The repository's configuration, for these targets and often."""
    loaded: dict[str, Any] = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())
    loaded["global"] = {"scrape_interval": "200ms", "evaluation_interval": "200ms"}
    loaded["rule_files"] = [str(FOLDER / "rules.yaml")]
    (job,) = loaded["scrape_configs"]
    (folder / "key").write_text(KEY)
    job["authorization"] = {"credentials_file": str(folder / "key")}
    job["static_configs"] = [{"targets": targets}]
    path = folder / "prometheus.yaml"
    path.write_text(yaml.safe_dump(loaded))
    return path


def query(port: int, expression: str) -> list[dict[str, Any]]:
    text = urllib.parse.urlencode({"query": expression})
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/query?{text}", timeout=10) as got:
        answer: dict[str, Any] = json.load(got)
    assert answer["status"] == "success", answer
    result = answer["data"]["result"]
    return result if answer["data"]["resultType"] == "vector" else [{"value": result}]


async def parts_add_up(port: int) -> bool:
    """Whether the parts of all times to the first token are the whole. A scrape can come between them."""
    parts = 'sum(headrace_latency_seconds_sum{headrace_latency_token="first_token"})'
    whole = "sum(gen_ai_server_time_to_first_token_seconds_sum)"
    (sample,) = await asyncio.to_thread(query, port, f"{parts} - {whole}")
    return abs(float(sample["value"][1])) < 1e-6


async def test_prometheus_answers_every_panel_and_rule(tmp_path: Path) -> None:
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("needs prometheus: apt-get install prometheus")
    keys = tmp_path / "keys"
    keys.write_text(f"{KEY} prometheus\n")
    ports = {name: free_port() for name in SERVICES}
    settings = tuple(
        setting
        for name, port in ports.items()
        for setting in (
            (name, "metrics_listen", f"127.0.0.1:{port}"),
            (name, "metrics_keys_file", str(keys)),
        )
    )
    port = free_port()
    async with suite(tmp_path, settings=settings) as it:
        targets = [f"127.0.0.1:{number}" for number in ports.values()]
        process = await asyncio.create_subprocess_exec(
            *(program, f"--config.file={prometheus_file(tmp_path, targets)}"),
            *(f"--storage.tsdb.path={tmp_path / 'data'}", f"--web.listen-address=127.0.0.1:{port}"),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:

            async def all_up() -> bool:
                try:
                    found = await asyncio.to_thread(query, port, "up == 1")
                except OSError:
                    return False
                return len(found) == len(SERVICES)

            await until(all_up, 40)
            for number in range(3):
                await it.generate(prompt_of(60, number), 6)

            async def counted(expression: str) -> bool:
                return bool(await asyncio.to_thread(query, port, expression))

            total = "sum(gen_ai_server_time_to_first_token_seconds_count)"
            await until(lambda: counted(f"{total} == 3"), 40)
            await it.generate(prompt_of(60, 9), 6)
            await until(
                lambda: counted(f"{total} == 4 and sum(rate(headrace_requests_total[1m])) > 0"), 40
            )
            asked = 4

            async def counted_with_load(expression: str) -> bool:
                """A rate needs two scrapes of its service, and one of a link a transfer between them."""
                nonlocal asked
                await it.generate(prompt_of(60, 6 + asked), 6)
                asked += 1
                return await counted(expression)

            for panel in (panel for path in DASHBOARDS for panel in panels(path)):
                for target in panel["targets"]:
                    expression = target["expr"].replace("$model", ".*")
                    answer = await asyncio.to_thread(query, port, expression)
                    if not answer and panel["title"] not in EMPTY_PANELS:
                        loaded = partial(counted_with_load, expression)
                        await until(loaded, 20, panel["title"], interval_s=0.3)
            for group in RULES["groups"]:
                for rule in group["rules"]:
                    await asyncio.to_thread(query, port, rule["expr"])
            await until(lambda: counted("headrace:time_to_first_token_share:by_part"), 20)
            await until(partial(parts_add_up, port), 20, "the parts add up to the whole")
        finally:
            process.terminate()
            await asyncio.wait_for(process.wait(), 30)
