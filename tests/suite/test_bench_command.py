"""`headrace bench` against a deployment of processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.ports import free_port
from tests.suite.deployment import suite
from tests.suite.test_command_line import headrace

SHAPE = ("--input-tokens", "40", "--output-tokens", "6", "--range-ratio", "0.3")


async def bench(*arguments: str) -> dict[str, Any]:
    done = await headrace("bench", "--json", *arguments)
    assert done.status == 0, done.err
    record: dict[str, Any] = json.loads(done.out)
    return record


async def test_both_apis_are_measured(tmp_path: Path) -> None:
    listen = f"127.0.0.1:{free_port()}"
    picture, output = tmp_path / "times.svg", tmp_path / "times.json"
    async with suite(tmp_path, settings=(("router", "http_listen", listen),)) as it:
        grpc = await bench(
            "--router", it.client.endpoint, "--requests", "24", *SHAPE, "--seed", "5"
        )
        files = ("--output", str(output), "--picture", str(picture))
        http = await bench(
            *("--url", f"http://{listen}", "--requests", "24", "--seed", "5"),
            *("--rate", "200", "--concurrency", "8", "--warmup", "2", *SHAPE, *files),
        )
        lines = tmp_path / "prompts"
        lines.write_text(
            '{"messages": [{"role": "user", "content": "Hi"}], "output_tokens": 4}\n' * 3
        )
        chat = await bench("--url", f"http://{listen}/v1", "--dataset", str(lines))
        failed = await headrace(
            *("bench", "--url", f"http://{listen}", "--model", "absent", "--requests", "2")
        )
    for record in (grpc, http):
        assert record["summary"]["completed"] == 24
        assert record["summary"]["failures"] == {}
        assert record["summary"]["times"]["ttft"]["count"] == 24
        lengths = [one["prompt_tokens"] for one in record["requests"]]
        assert 28 <= min(lengths) < max(lengths) <= 52
    # Equal seeds make equal requests, and exact lengths are kept.
    counts = [[one["output_tokens"] for one in each["requests"]] for each in (grpc,)]
    assert all(4 <= count <= 8 for count in counts[0])
    assert json.loads(output.read_text())["summary"] == http["summary"]
    assert picture.read_text().startswith("<svg")
    assert [one["output_tokens"] for one in chat["requests"]] == [4, 4, 4]
    assert failed.status == 1
    assert "no request succeeded" in failed.err
    assert "absent" in failed.err
