"""Every service serves its metrics to Prometheus."""

from __future__ import annotations

import asyncio
import re
import urllib.request
from pathlib import Path
from typing import Any

import prometheus_client.openmetrics.parser

from headrace.inference.v1 import inference_pb2
from tests.ports import free_port
from tests.suite.deployment import prompt_of, suite

KEY = "the-key-of-a-reader"
ROLES = ("registry", "router", "prefill", "decode")
REQUESTS = 3
# A router, a prefill worker and a decode worker.
MEMBERS = 3
read_families: Any = prometheus_client.openmetrics.parser.text_string_to_metric_families


def scrape(address: str) -> dict[str, Any]:
    """The families of metrics by name, as Prometheus asks for them."""
    headers = {"Authorization": f"Bearer {KEY}", "Accept": "application/openmetrics-text"}
    request = urllib.request.Request(f"http://{address}/metrics", headers=headers)
    with urllib.request.urlopen(request, timeout=10) as answer:
        return {one.name: one for one in read_families(answer.read().decode())}


def total(families: dict[str, Any], name: str, suffix: str = "") -> float:
    found = families.get(name)
    samples = found.samples if found is not None else ()
    return sum(float(one.value) for one in samples if one.name == name + suffix)


async def test_every_service_serves_its_metrics(tmp_path: Path) -> None:
    readers = tmp_path / "readers"
    readers.write_text(f"{KEY} prometheus\n", encoding="utf-8")
    addresses = {role: f"127.0.0.1:{free_port()}" for role in ROLES}
    settings = [
        setting
        for role, address in addresses.items()
        for setting in (
            (role, "metrics_listen", address),
            (role, "metrics_keys_file", str(readers)),
        )
    ]
    async with suite(tmp_path, settings=settings) as it:
        remote = inference_pb2.PREFILL_PLACEMENT_REMOTE
        outcomes = [
            await it.generate(prompt_of(40, number), 6, placement=remote)
            for number in range(REQUESTS)
        ]
        read: dict[str, dict[str, Any]] = {}

        async def read_all() -> None:
            for role, address in addresses.items():
                read[role] = await asyncio.to_thread(scrape, address)

        # The gauges are sampled every second.
        async with asyncio.timeout(20):
            while (
                total(read.get("decode", {}), "headrace_blocks_total") == 0
                or total(read["registry"], "headrace_registry_members") < MEMBERS
            ):
                await read_all()
    router = read["router"]
    first = "gen_ai_server_time_to_first_token_seconds"
    assert total(router, first, "_count") == REQUESTS
    assert total(router, "headrace_requests", "_total") == REQUESTS
    traces = {
        sample.exemplar.labels["trace_id"] for sample in router[first].samples if sample.exemplar
    }
    assert traces
    assert traces <= {outcome.trace_id for outcome in outcomes}
    assert all(re.fullmatch("[0-9a-f]{32}", trace) for trace in traces)
    assert total(read["prefill"], "headrace_transfers", "_total") == REQUESTS
    assert {
        sample.labels["headrace_transfer_state"]
        for sample in read["decode"]["headrace_transfers_by_state"].samples
    } >= {"reserved", "open", "receiving", "draining"}
    assert total(read["prefill"], "headrace_link_bytes", "_total") > 0
    assert total(read["registry"], "headrace_registry_members") == MEMBERS
    assert "headrace_registry_corrupt_records" in read["registry"]
