"""Look-aside clients stream from decode workers directly, in whole deployments."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc.aio
import pytest

from headrace.decode.v1 import decode_pb2, decode_pb2_grpc
from headrace.inference.v1 import inference_pb2
from headrace_client import Client
from headrace_common.errors import HeadraceError, Unauthenticated
from headrace_common.rpc.channel import open_channel
from headrace_common.rpc.status import error_from_rpc
from headrace_common.telemetry import schema
from tests.suite.deployment import DEADLINE_S, Suite, greedy, prompt_of, suite

LOOK_ASIDE = (("router", "look_aside", "true"),)
REMOTE = inference_pb2.PREFILL_PLACEMENT_REMOTE


async def answer_of(
    client: Client, prompt: list[int], count: int
) -> tuple[tuple[int, ...], list[inference_pb2.GenerateResponse]]:
    request = greedy(prompt, count, REMOTE)
    responses = [r async for r in client.stream(request, DEADLINE_S, tokens_only=True)]
    return tuple(token for r in responses for token in r.token_ids), responses


async def test_direct_streams_are_correct_and_make_one_trace(tmp_path: Path) -> None:
    async with (
        suite(tmp_path, prefill_count=1, decode_count=2, settings=LOOK_ASIDE) as deployed,
        Client(deployed.deployment.router, look_aside=True) as client,
    ):
        prompts = [prompt_of(60 + 40 * seed, seed) for seed in range(6)]
        answers = await asyncio.gather(*(answer_of(client, prompt, 12) for prompt in prompts))
        for prompt, (tokens, responses) in zip(prompts, answers, strict=True):
            assert tokens == deployed.expected(prompt, 12)
            assert responses[-1].usage.transferred_tokens == len(prompt) - 1
            assert responses[-1].timing.prefill_worker_id == "prefill-0"
        assert client.direct_answers == len(prompts)
        trace_id = next(r.trace_id for r in answers[0][1] if r.trace_id)
        names: set[str] = set()
        for _ in range(50):
            names = {span.name for span in (await deployed.trace(trace_id)).spans}
            if {schema.SPAN_DECODE, schema.SPAN_PREFILL} <= names:
                break
            await asyncio.sleep(0.1)
        assert {schema.SPAN_ROUTE, schema.SPAN_DECODE, schema.SPAN_PREFILL} <= names
        await the_routers_own_way_works_too(deployed)
        await reject_invalid_tickets(deployed, client)
        for name in ("decode-0", "decode-1"):
            await deployed.wait_empty(name)


async def the_routers_own_way_works_too(deployed: Suite) -> None:
    prompt = prompt_of(50, 99)
    outcome = await deployed.generate(prompt, 4)
    assert outcome.token_ids == deployed.expected(prompt, 4)


async def reject_invalid_tickets(deployed: Suite, client: Client) -> None:
    """Refused: no ticket, a used ticket, a ticket for another request."""
    routed = await client.route(greedy(prompt_of(40, 7), 4))
    direct = routed.direct
    good = decode_pb2.GenerateRequest(
        request_id=direct.request_id,
        transfer_id=direct.transfer_id,
        incarnation=direct.incarnation,
        token_ids=direct.token_ids,
        sampling=direct.sampling,
        stop_token_ids=direct.stop_token_ids,
        ticket=direct.ticket,
    )
    good.remote_prefill = direct.remote_prefill
    bare, longer = decode_pb2.GenerateRequest(), decode_pb2.GenerateRequest()
    bare.CopyFrom(good)
    bare.ClearField("ticket")
    longer.CopyFrom(good)
    longer.sampling.max_tokens += 1
    async with open_channel(direct.endpoint) as channel:
        for request, field in ((bare, "missing"), (longer, "request_hash")):
            error = await error_of(channel, request)
            assert isinstance(error, Unauthenticated)
            assert error.metadata["ticket"] == field


async def error_of(channel: grpc.aio.Channel, request: decode_pb2.GenerateRequest) -> HeadraceError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        async for _ in decode_pb2_grpc.DecodeServiceStub(channel).Generate(request, timeout=5):
            pass
    return error_from_rpc(raised.value)
