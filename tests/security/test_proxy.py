"""Floods of HTTP/2 through the Envoy of docker/envoy.yaml reach the router as nothing that costs memory."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace_common.rpc.channel import open_channel
from tests.ports import free_port
from tests.security.bystander import ROOT
from tests.security.grpc_flood import ATTACKS
from tests.security.test_grpc_bounds import asking, attacker
from tests.suite.deployment import prompt_of, suite
from tests.suite.envoy import envoy_running, find_envoy

pytestmark = pytest.mark.skipif(not find_envoy(), reason="needs Envoy: CONTRIBUTING.md")

GROWTH_BYTES_MAX = 48 * 1024 * 1024
RATE = "max_tokens: 2048, tokens_per_fill: 256, fill_interval: 1s"


def write_config(folder: Path, port: int, router: str) -> Path:
    """The configuration with other ports."""
    text = (ROOT / "docker" / "envoy.yaml").read_text(encoding="utf-8")
    for old, new in ((7050, str(port)), (7060, router.rpartition(":")[2])):
        assert f"port_value: {old}" in text
        text = text.replace(f"port_value: {old}", f"port_value: {new}")
    config = folder / "envoy.yaml"
    config.write_text(text.replace("0.0.0.0", "127.0.0.1"), encoding="utf-8")
    return config


@pytest.mark.timeout(300)
async def test_floods_cost_a_router_behind_the_proxy_no_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with suite(tmp_path) as it:
        port = free_port()
        config = write_config(tmp_path, port, it.deployment.router)
        router = psutil.Process(it.child("router").process.pid)
        async with envoy_running(config, [port]):
            endpoint = f"127.0.0.1:{port}"
            async with open_channel(endpoint) as channel:
                through = replace(it, channel=channel)
                answer = await through.generate(prompt_of(40, 1), 30)
                assert answer.token_ids == it.expected(prompt_of(40, 1), 30)
            with attacker() as attack:
                for kind in ATTACKS:
                    before_bytes = router.memory_info().rss
                    with asking(endpoint) as times:
                        await asyncio.to_thread(attack, endpoint, kind)
                    grown_bytes = router.memory_info().rss - before_bytes
                    line = f"{kind}: longest {1e3 * max(times):.0f} ms, +{grown_bytes >> 20} MiB"
                    assert grown_bytes < GROWTH_BYTES_MAX, line
                    with capsys.disabled():
                        print(f"\n{line}", end="")
        text = config.read_text(encoding="utf-8")
        assert RATE in text
        text = text.replace(RATE, "max_tokens: 20, tokens_per_fill: 1, fill_interval: 600s")
        config.write_text(text, encoding="utf-8")
        async with envoy_running(config, [port]), open_channel(endpoint) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest()
            calls = (health.Check(request, timeout=60) for _ in range(30))
            found = await asyncio.gather(*calls, return_exceptions=True)
        refused = [one.code() for one in found if isinstance(one, grpc.aio.AioRpcError)]
        assert refused == [grpc.StatusCode.RESOURCE_EXHAUSTED] * 10
