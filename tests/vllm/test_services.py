"""The services with real vLLM engines. Engines are killed, and each answer equals that of an undisturbed run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.inference.v1 import first_token_pb2, inference_pb2
from headrace_common.latency.parts import TimePart, sum_from_proto
from headrace_common.telemetry import schema
from tests.devices import CPU, DEVICES, require, shared
from tests.freezing import freeze
from tests.suite.deployment import Outcome, greedy, suite
from tests.waiting import until

MODEL = Path("models/tiny-llama")
REMOTE = inference_pb2.PREFILL_PLACEMENT_REMOTE
LOCAL = inference_pb2.PREFILL_PLACEMENT_LOCAL
VLLM: dict[str, Any] = {"engine": "vllm", "model": str(MODEL)}
SEEDED: dict[str, Any] = {
    "temperature": 0.8,
    "seed": 5,
    "presence_penalty": 0.6,
    "repetition_penalty": 1.2,
}
REQUESTS = 10
pytestmark = [
    pytest.mark.usefixtures("state_folder"),
    pytest.mark.timeout(280),
    pytest.mark.skipif(not MODEL.is_dir(), reason="the model is not there: make model"),
]


def on(device: str) -> dict[str, Any]:
    """Options of a deployment on a device. Skips the test without it."""
    require(device)
    return {**VLLM, "settings": shared(device, dtype="float32", engine_args="--enforce-eager")}


def prompt_of(length: int, seed: int) -> list[int]:
    return [(7 * seed + 13 * index) % 400 + 8 for index in range(length)]


def assert_same(one: Outcome, other: Outcome) -> None:
    """Equal except for the rounding of log probabilities."""

    def logprobs(outcome: Outcome) -> list[float]:
        return [entry.logprob for entry in outcome.logprobs]

    assert one.token_ids == other.token_ids
    assert one.text == other.text
    assert logprobs(one) == pytest.approx(logprobs(other), abs=1e-3)
    assert one.last.finish_reason == other.last.finish_reason
    assert one.last.usage.completion_tokens == other.last.usage.completion_tokens


@pytest.mark.parametrize("device", DEVICES)
async def test_ten_requests_in_flight_outlive_their_prefill_worker(
    device: str, tmp_path: Path
) -> None:
    def requests(
        placement: inference_pb2.PrefillPlacement.ValueType,
    ) -> Iterator[inference_pb2.GenerateRequest]:
        for number in range(REQUESTS):
            yield greedy(prompt_of(200 + 10 * number, number), 8, placement, logprobs=1)

    async with suite(tmp_path, **on(device)) as it:

        async def all_are_in_flight() -> bool:
            return (await it.status("decode-0")).active_transfers == REQUESTS

        # Stopped before it can answer, so that all ten requests are in flight at the kill.
        freeze(it.child("prefill-0").process.pid)
        running = [asyncio.create_task(it.ask(one, 90)) for one in requests(REMOTE)]
        await until(all_are_in_flight, 20.0, interval_s=0.05)
        it.kill("prefill-0")
        disturbed = await asyncio.gather(*running)
        for request, result in zip(requests(LOCAL), disturbed, strict=True):
            assert result.last.timing.prefill_worker_id == ""
            assert result.last.timing.attempts > 1
            assert_same(result, await it.ask(request, 90))
        await it.wait_empty("decode-0", timeout_s=40)


@pytest.mark.parametrize("device", DEVICES)
async def test_streams_of_a_killed_decode_worker_continue_on_the_other(
    device: str, tmp_path: Path
) -> None:
    requests = [
        greedy(prompt_of(60 + n, n), 120, LOCAL, logprobs=1, **(SEEDED if n % 2 else {}))
        for n in range(4)
    ]
    async with suite(tmp_path, **on(device), prefill_count=0, decode_count=2) as it:
        undisturbed = [await it.ask(request, 90) for request in requests]
        running = await it.begun(requests, timeout_s=90, started_tokens=8)
        victim, survivor = await it.busier("decode-0", "decode-1")
        it.kill(victim)
        disturbed = await asyncio.gather(*running)
        for result, plain in zip(disturbed, undisturbed, strict=True):
            assert_same(result, plain)
        assert max(result.last.timing.attempts for result in disturbed) == 2
        await it.wait_empty(survivor, timeout_s=20)


@pytest.mark.vllm
async def test_the_sums_of_requests_between_uneven_ranks_are_complete(tmp_path: Path) -> None:
    """20 requests from one rank to two, with the first token made three ways."""
    policies = (
        first_token_pb2.FIRST_TOKEN_POLICY_DECODE,
        first_token_pb2.FIRST_TOKEN_POLICY_PREFILL,
        first_token_pb2.FIRST_TOKEN_POLICY_HIDDEN,
    )
    has_second = 0
    async with suite(tmp_path, **on(CPU), decode_tensor_parallel=2) as it:
        for number in range(20):
            request = greedy(prompt_of(200 + 20 * number, number), 4, REMOTE)
            request.first_token = policies[number % len(policies)]
            request.include_latency = True
            outcome = await it.ask(request, 60)
            latency = outcome.last.timing.latency
            first = sum_from_proto(latency.first_token)
            assert sum(first.parts_us.values()) == first.total_us
            assert first[TimePart.PREFILL] > 0, first
            assert first[TimePart.UNACCOUNTED] * 50 <= first.total_us, first
            # Decode's first token may join prefill's in one message. Then no gap lies between them.
            has_second += latency.HasField("second_token")
            assert number % len(policies) or not latency.HasField("second_token")
            second = sum_from_proto(latency.second_token)
            assert second[TimePart.UNACCOUNTED] * 50 <= second.total_us, second
            assert latency.transfer_owner
            trace = await it.trace(outcome.trace_id)
            (wait,) = (span for span in trace.spans if span.name == schema.SPAN_DECODE_KV_WAIT)
            (sent,) = (span for span in trace.spans if span.name == schema.SPAN_PREFILL)
            payload = schema.ATTRIBUTE_PAYLOAD_BYTES
            assert wait.attributes[payload] == sent.attributes[payload]
    assert has_second > 6
