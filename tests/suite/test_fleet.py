"""Many sim workers in one process, and workers that join and leave under load."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

from headrace.inference.v1 import inference_pb2
from tests.suite.churn import churn
from tests.suite.deployment import prompt_of, suite

REMOTE = inference_pb2.PREFILL_PLACEMENT_REMOTE
CHANGES = 12
ANSWERS = 50
# Six seconds on a fast machine.
CHURN_S = 90.0


async def test_a_process_hosts_many_workers(tmp_path: Path) -> None:
    async with suite(tmp_path, prefill_count=9, decode_count=12) as it:
        assert {child.spec.name for child in it.deployment.children} == {
            "registry",
            "router",
            "prefill",
            "decode",
        }
        ports = it.child("decode").spec.port_file.read_text().split()
        assert len(set(ports)) == 12
        prompts = [prompt_of(80 + number % 40, number) for number in range(60)]
        outcomes = await asyncio.gather(*(it.generate(one, 8, placement=REMOTE) for one in prompts))
        for prompt, outcome in zip(prompts, outcomes, strict=True):
            assert outcome.token_ids == it.expected(prompt, 8)
            assert outcome.last.usage.transferred_tokens == len(prompt) - 1
        timings = [outcome.last.timing for outcome in outcomes]
        decodes = Counter(timing.decode_worker_id for timing in timings)
        prefills = {timing.prefill_worker_id for timing in timings}
        assert set(decodes) <= {f"decode-{number}" for number in range(12)}
        assert prefills <= {f"prefill-{number}" for number in range(9)}
        assert len(decodes) >= 10
        assert max(decodes.values()) <= 15
        assert len(prefills) >= 5
        # Each span names the worker that made it.
        trace = await it.trace(outcomes[0].trace_id)
        assert {span.worker_id for span in trace.spans} >= {
            timings[0].decode_worker_id,
            timings[0].prefill_worker_id,
        }


async def test_workers_come_and_go_under_load(tmp_path: Path) -> None:
    async with suite(tmp_path) as it:
        async with asyncio.timeout(CHURN_S):
            seen = await churn(
                it,
                enough=lambda seen: seen.changes >= CHANGES and len(seen.seconds) > ANSWERS,
                every_s=0.5,
            )
        assert seen.failures == []
        assert seen.changes >= CHANGES
        assert len(seen.seconds) > ANSWERS
        assert seen.attempts.keys() <= {1, 2}
