"""Arize Phoenix, a tracing backend, receives the spans of every process over OTLP.

It takes 850 MB, so no set-up installs it: `pip install arize-phoenix` in an environment of its own, and set
HEADRACE_TEST_PHOENIX to the path of its program `phoenix`.
"""

from __future__ import annotations

import asyncio
import json
import os
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from headrace_common.telemetry import schema
from tests.ports import free_port
from tests.suite.deployment import prompt_of, suite
from tests.waiting import until

VARIABLE = "HEADRACE_TEST_PHOENIX"
START_S = 90.0
REQUESTS = 3


def spans_of(port: int) -> list[dict[str, Any]]:
    url = f"http://127.0.0.1:{port}/v1/projects/default/spans?limit=1000"
    with urllib.request.urlopen(url, timeout=10) as answer:
        found: dict[str, Any] = json.load(answer)
    return list(found["data"])


@pytest.mark.timeout(300)
async def test_phoenix_has_one_whole_trace_for_each_request(tmp_path: Path) -> None:
    program = os.environ.get(VARIABLE, "")
    if not program:
        pytest.skip(f"needs Phoenix: set {VARIABLE}")
    http, grpc = free_port(), free_port()
    own = {
        "PHOENIX_HOST": "127.0.0.1",
        "PHOENIX_PORT": str(http),
        "PHOENIX_GRPC_PORT": str(grpc),
        "PHOENIX_WORKING_DIR": str(tmp_path / "phoenix"),
        "PHOENIX_TELEMETRY_ENABLED": "false",
    }
    (tmp_path / "phoenix").mkdir()
    process = await asyncio.create_subprocess_exec(
        *(program, "serve"),
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), **own},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )

    async def serves() -> bool:
        assert process.returncode is None, "Phoenix ended"
        try:
            await asyncio.to_thread(spans_of, http)
        except OSError:
            return False
        return True

    try:
        await until(serves, START_S, interval_s=0.2)
        endpoint = f"http://127.0.0.1:{grpc}"
        settings = tuple(
            (name, "otlp_endpoint", endpoint) for name in ("router", "prefill", "decode")
        )
        async with suite(tmp_path, settings=settings) as it:
            outcomes = [await it.generate(prompt_of(60, n), 4) for n in range(REQUESTS)]
            traces = [await it.trace(outcome.trace_id) for outcome in outcomes]

            async def all_there() -> bool:
                return len(await asyncio.to_thread(spans_of, http)) >= sum(
                    len(trace.spans) for trace in traces
                )

            await until(all_there, 60, interval_s=0.2)
        spans = await asyncio.to_thread(spans_of, http)
        for trace in traces:
            ours = [one for one in spans if one["context"]["trace_id"] == trace.trace_id]
            assert sorted(one["name"] for one in ours) == sorted(one.name for one in trace.spans)
            ids = {one["context"]["span_id"] for one in ours}
            roots = [one["name"] for one in ours if one["parent_id"] not in ids]
            assert roots == [schema.SPAN_REQUEST]
    finally:
        if process.returncode is None:
            process.terminate()
            await asyncio.wait_for(process.wait(), 30)
