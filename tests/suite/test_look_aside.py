"""Look-aside clients stream from decode workers directly, in whole deployments."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc.aio
import pytest

from headrace.decode.v1 import decode_pb2, decode_pb2_grpc
from headrace.inference.v1 import inference_pb2
from headrace_client import Client
from headrace_common.errors import Unauthenticated
from headrace_common.rpc.channel import open_channel
from headrace_common.rpc.status import error_from_rpc
from headrace_common.telemetry import schema
from tests.suite.deployment import DEADLINE_S, greedy, prompt_of, suite
from tests.waiting import until

STRICT = (("router", "look_aside", "true"), ("decode", "require_ticket", "true"))
REMOTE = inference_pb2.PREFILL_PLACEMENT_REMOTE


async def test_direct_streams_are_correct_and_make_one_trace(tmp_path: Path) -> None:
    async with (
        suite(tmp_path, prefill_count=1, decode_count=2, settings=STRICT) as it,
        Client(it.deployment.router, look_aside=True) as client,
    ):

        async def answer(
            request: inference_pb2.GenerateRequest,
        ) -> list[inference_pb2.GenerateResponse]:
            return [r async for r in client.stream(request, DEADLINE_S, tokens_only=True)]

        prompts = [prompt_of(60 + 40 * seed, seed) for seed in range(6)]
        answers = await asyncio.gather(*(answer(greedy(one, 12, REMOTE)) for one in prompts))
        for prompt, responses in zip(prompts, answers, strict=True):
            assert tuple(t for r in responses for t in r.token_ids) == it.expected(prompt, 12)
            assert responses[-1].usage.transferred_tokens == len(prompt) - 1
            assert responses[-1].timing.prefill_worker_id == "prefill-0"
        assert client.direct_answers == len(prompts)
        trace_id = next(r.trace_id for r in answers[0] if r.trace_id)

        async def complete() -> bool:
            names = {span.name for span in (await it.trace(trace_id)).spans}
            return {schema.SPAN_ROUTE, schema.SPAN_DECODE, schema.SPAN_PREFILL} <= names

        await until(complete, interval_s=0.1)
        # The router's own way works as well.
        outcome = await it.generate(prompt_of(50, 99), 4)
        assert outcome.token_ids == it.expected(prompt_of(50, 99), 4)
        await refuse_without_ticket(client)
        for name in ("decode-0", "decode-1"):
            await it.wait_empty(name)


async def refuse_without_ticket(client: Client) -> None:
    direct = (await client.route(greedy(prompt_of(40, 7), 4))).direct
    request = decode_pb2.GenerateRequest(
        request_id=direct.request_id,
        transfer_id=direct.transfer_id,
        incarnation=direct.incarnation,
        token_ids=direct.token_ids,
        sampling=direct.sampling,
    )
    async with open_channel(direct.endpoint) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await decode_pb2_grpc.DecodeServiceStub(channel).Generate(request, timeout=5).read()
    error = error_from_rpc(raised.value)
    assert isinstance(error, Unauthenticated)
    assert error.metadata["ticket"] == "missing"
