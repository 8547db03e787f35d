"""`headrace profile` against a deployment of processes, and the simulator with what it wrote."""

from __future__ import annotations

import json
from pathlib import Path

from headrace_planner.settings import WorkerProfile
from tests.suite.deployment import suite
from tests.suite.test_command_line import headrace

TOKEN_S, STEP_S = 0.0005, 0.01


async def test_a_worker_is_measured_and_the_simulator_reads_its_profile(tmp_path: Path) -> None:
    settings = (
        ("prefill", "model", f"sim:prefill_s_per_token={TOKEN_S}"),
        ("decode", "model", f"sim:decode_step_s={STEP_S}"),
    )
    output = tmp_path / "profile.json"
    async with suite(tmp_path, settings=settings, prefill_count=1, decode_count=1) as it:
        done = await headrace(
            *("profile", "--router", it.client.endpoint, "--output", str(output), "--repeats", "1"),
            *("--registry", it.deployment.registry, "--answer-tokens", "8"),
            *("--prompt-tokens", "40", "--prompt-tokens", "400", "--context-tokens", "40"),
            *("--concurrency", "1", "--concurrency", "3"),
        )
        assert done.status == 0, done.err
    profile = WorkerProfile.model_validate_json(output.read_text())
    for point, length in zip(profile.prefill, (40, 400), strict=True):
        assert point.prompt_tokens == length
        assert point.ttft_s >= (length - 1) * TOKEN_S
    assert [round(one.itl_s * one.tokens_per_s) for one in profile.decode] == [1, 3]
    assert profile.kv_tokens > 1_000
    assert profile.max_num_seqs >= 3
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 400, "output_length": 9, "hash_ids": []}\n')
    simulated = await headrace(
        *("simulate", "--trace", str(trace), "--profile", str(output), "--json"),
        *("--placement", "KV-aware"),
    )
    assert simulated.status == 0, simulated.err
    (run,) = json.loads(simulated.out)["runs"]
    assert run["ttft"]["percentiles"]["p50"] >= 399 * TOKEN_S / 2
    assert run["requests"] == 1
