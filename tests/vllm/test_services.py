"""The services with real vLLM engines. Engines are killed, and each answer equals that of an undisturbed run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from headrace.decode.v1 import decode_pb2, decode_pb2_grpc
from headrace.inference.v1 import first_token_pb2, inference_pb2, sampling_pb2
from headrace.worker.v1 import worker_pb2, worker_pb2_grpc
from headrace_cli.client import list_members
from headrace_common.access.credentials import Credentials
from headrace_common.access.roles import Role
from headrace_common.errors import InvalidRequest, ProtocolViolation
from headrace_common.rpc.channel import open_channel
from headrace_common.rpc.status import error_from_rpc
from tests.devices import DEVICES, require, shared
from tests.freezing import freeze
from tests.linked_call import LinkedCall
from tests.router_key import RouterKey
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


async def test_tokens_beyond_the_vocabulary_end_no_engine(tmp_path: Path) -> None:
    router = RouterKey()
    vocabulary = json.loads((MODEL / "config.json").read_text())["vocab_size"]
    async with suite(tmp_path, **on("cpu"), prefill_count=0) as it:
        (decode,) = [
            one for one in await list_members(it.deployment.registry) if one.worker_id == "decode-0"
        ]

        def asked(name: str, token_ids: list[int]) -> decode_pb2.GenerateRequest:
            return decode_pb2.GenerateRequest(
                request_id="r",
                transfer_id=name,
                incarnation=decode.incarnation,
                token_ids=token_ids,
                sampling=sampling_pb2.SamplingParams(max_tokens=4),
                remote_prefill=True,
                first_token=first_token_pb2.FIRST_TOKEN_POLICY_PREFILL,
                ticket_key_id=router.key_id,
            )

        channel = open_channel(decode.endpoint, Credentials(role=Role.ROUTER))
        watch: Any = worker_pb2_grpc.WorkerServiceStub(channel).WatchStatus(
            worker_pb2.WatchStatusRequest(ticket_public_key=router.key.public.public_key)
        )
        await watch.read()
        before = await it.ask(greedy(prompt_of(60, 1), 8, LOCAL), 90)
        call = LinkedCall(channel, asked("x1", prompt_of(60, 2)), 60)
        assert (await anext(call)).kind == "reserved"
        for token_id in (vocabulary, 2**32 - 1):
            wrong = decode_pb2.SetFirstTokenRequest(
                transfer_id="x1", incarnation=decode.incarnation, token_id=token_id
            )
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await decode_pb2_grpc.DecodeServiceStub(channel).SetFirstToken(wrong)
            assert isinstance(error_from_rpc(refused.value), ProtocolViolation)
            with pytest.raises(InvalidRequest):
                await anext(LinkedCall(channel, asked(f"y{token_id}", [5, token_id, 6]), 60))
        call.cancel()
        after = await it.ask(greedy(prompt_of(60, 1), 8, LOCAL), 90)
        assert_same(after, before)
        watch.cancel()
        await channel.close()
