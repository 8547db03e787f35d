"""`headrace profile` against a deployment of processes, and the simulator with what it wrote."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from headrace_planner.settings import WorkerProfile
from tests.suite.deployment import suite
from tests.suite.test_command_line import headrace

TOKEN_S, STEP_S = 0.0005, 0.01


async def test_what_workers_have_learned_is_written_and_the_simulator_reads_it(
    tmp_path: Path,
) -> None:
    settings = (
        ("prefill", "model", f"sim:prefill_s_per_token={TOKEN_S}"),
        ("decode", "model", f"sim:decode_step_s={STEP_S}"),
    )
    output = tmp_path / "profile.json"
    async with suite(tmp_path, settings=settings, prefill_count=1, decode_count=1) as it:
        given = (
            *("profile", "--router", it.client.endpoint, "--output", str(output)),
            *("--registry", it.deployment.registry),
        )
        early = await headrace(*given)
        assert "send at least 5 prompts" in early.err
        for number in range(12):
            await it.generate(range(300 + number, 400 + 30 * number), 8)
        async with asyncio.timeout(20.0):
            while (await headrace(*given)).status:
                await asyncio.sleep(0.5)
    profile = WorkerProfile.model_validate_json(output.read_text())
    assert profile.prompt_s(400) >= 399 * TOKEN_S / 2
    assert profile.step_s(1, 400) >= STEP_S / 2
    assert profile.kv_tokens > 1_000
    assert profile.max_num_seqs >= 3
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 400, "output_length": 9, "hash_ids": []}\n')
    for workers in ("0", "2"):
        simulated = await headrace(
            *("simulate", "--trace", str(trace), "--profile", str(output), "--json"),
            *("--placement", "KV-aware", "--workers", workers),
        )
        assert simulated.status == 0, simulated.err
        (run,) = json.loads(simulated.out)["runs"]
        assert run["ttft"]["percentiles"]["p50"] >= 399 * TOKEN_S / 2
        assert run["requests"] == 1
