"""Real vLLM engines are killed, and each answer equals that of an undisturbed run."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from headrace.inference.v1 import inference_pb2, inference_pb2_grpc, sampling_pb2
from tests.suite.deployment import Suite, suite
from tests.vllm.test_services import FLOAT32, LOCAL, MODEL, REMOTE, prompt_of
from tests.waiting import until

REQUESTS = 10
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not MODEL.is_dir(), reason="the model is not there: make setup"),
]


@pytest.fixture(autouse=True)
def state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@dataclass
class Result:
    """All responses of one request."""

    token_ids: tuple[int, ...]
    logprobs: list[float]
    text: str
    last: inference_pb2.GenerateResponse


async def ask(
    it: Suite,
    prompt: Sequence[int],
    sampling: sampling_pb2.SamplingParams,
    placement: inference_pb2.PrefillPlacement.ValueType = LOCAL,
    begun: asyncio.Event | None = None,
) -> Result:
    stub = inference_pb2_grpc.InferenceServiceStub(it.channel)
    request = inference_pb2.GenerateRequest(
        tokens=inference_pb2.TokenIds(ids=prompt), sampling=sampling, prefill_placement=placement
    )
    responses = []
    async for response in stub.Generate(request, timeout=90):
        responses.append(response)
        if begun is not None and sum(len(r.token_ids) for r in responses) >= 8:
            begun.set()
    return Result(
        tuple(token for r in responses for token in r.token_ids),
        [entry.logprob for r in responses for entry in r.logprobs],
        "".join(r.text for r in responses),
        responses[-1],
    )


def greedy(count: int) -> sampling_pb2.SamplingParams:
    return sampling_pb2.SamplingParams(
        temperature=0.0, max_tokens=count, ignore_eos=True, logprobs=1
    )


def seeded(count: int) -> sampling_pb2.SamplingParams:
    return sampling_pb2.SamplingParams(
        temperature=0.8,
        seed=5,
        presence_penalty=0.6,
        repetition_penalty=1.2,
        max_tokens=count,
        ignore_eos=True,
        logprobs=1,
    )


def assert_same(one: Result, other: Result) -> None:
    """Equal except for the rounding of log probabilities."""
    assert one.token_ids == other.token_ids
    assert one.text == other.text
    assert one.logprobs == pytest.approx(other.logprobs, abs=1e-3)
    assert one.last.finish_reason == other.last.finish_reason
    assert one.last.usage.completion_tokens == other.last.usage.completion_tokens


@asynccontextmanager
async def engines(
    folder: Path, *, prefill_count: int = 1, decode_count: int = 1
) -> AsyncIterator[Suite]:
    async with suite(
        folder,
        engine="vllm",
        model=str(MODEL),
        settings=FLOAT32,
        prefill_count=prefill_count,
        decode_count=decode_count,
    ) as it:
        yield it


@pytest.mark.timeout(280)
async def test_ten_requests_in_flight_outlive_their_prefill_worker(tmp_path: Path) -> None:
    prompts = [prompt_of(200 + 10 * number, number) for number in range(REQUESTS)]
    async with engines(tmp_path) as it:
        # Stopped before it can answer, so that all ten requests are in flight at the kill.
        prefill = it.child("prefill-0").process.pid
        os.kill(prefill, signal.SIGSTOP)
        running = [asyncio.create_task(ask(it, one, greedy(8), REMOTE)) for one in prompts]

        async def all_are_in_flight() -> bool:
            return (await it.status("decode-0")).active_transfers == REQUESTS

        await until(all_are_in_flight, 20.0, interval_s=0.05)
        it.kill("prefill-0")
        disturbed = await asyncio.gather(*running)
        for prompt, result in zip(prompts, disturbed, strict=True):
            assert result.last.timing.prefill_worker_id == ""
            assert result.last.timing.attempts > 1
            assert_same(result, await ask(it, prompt, greedy(8)))
        await it.wait_empty("decode-0", timeout_s=40)


@pytest.mark.timeout(280)
async def test_streams_of_a_killed_decode_worker_continue_on_the_other(tmp_path: Path) -> None:
    count = 120
    asked = [
        (prompt_of(60 + number, number), (greedy, seeded)[number % 2](count)) for number in range(4)
    ]
    async with engines(tmp_path, prefill_count=0, decode_count=2) as it:
        undisturbed = [await ask(it, prompt, sampling) for prompt, sampling in asked]
        begun = [asyncio.Event() for _ in asked]
        running = [
            asyncio.create_task(ask(it, prompt, sampling, begun=event))
            for (prompt, sampling), event in zip(asked, begun, strict=True)
        ]
        async with asyncio.timeout(60):
            await asyncio.gather(*(event.wait() for event in begun))
        # A worker that has requests.
        busy = "decode-0" if (await it.status("decode-0")).running_requests else "decode-1"
        it.kill(busy)
        disturbed = await asyncio.gather(*running)
        for result, plain in zip(disturbed, undisturbed, strict=True):
            assert_same(result, plain)
        assert max(result.last.timing.attempts for result in disturbed) == 2
        other = {"decode-0": "decode-1", "decode-1": "decode-0"}[busy]
        await it.wait_empty(other, timeout_s=20)
