"""Decode workers behind a gateway: their own OpenAI HTTP, with prefill through a router."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai

from headrace.registry.v1 import registry_pb2, registry_pb2_grpc
from headrace_common.telemetry import schema
from tests.channels import operator_channel
from tests.suite.deployment import Suite, suite
from tests.suite.test_openai import WAIT_S, grpc_text
from tests.waiting import until

DOOR = ("decode", "http_listen", "127.0.0.1:0")
QUESTION = "Which of these words do you know? " * 6


def messages(text: str) -> Any:
    return [{"role": "user", "content": text}]


async def http_endpoints(it: Suite) -> dict[str, str]:
    """The HTTP address of each decode worker, as the registry has it."""
    registry = it.child("registry").endpoint
    async with operator_channel(registry) as channel:
        stub = registry_pb2_grpc.RegistryServiceStub(channel)
        request = registry_pb2.ListMembersRequest(role=registry_pb2.Member.ROLE_DECODE)
        members = (await stub.ListMembers(request, timeout=5)).members
    return {member.worker_id: member.http_endpoint for member in members}


@asynccontextmanager
async def door(endpoint: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"http://{endpoint}/v1", api_key="none", max_retries=0, timeout=WAIT_S
    ) as client:
        yield client


async def prefilled_on(it: Suite, request_id: str) -> str:
    """The prefill worker of a request, as its trace shows."""
    found: list[str] = []

    async def traced() -> bool:
        spans = (await it.trace(request_id)).spans
        found[:] = [span.worker_id for span in spans if span.name == schema.SPAN_PREFILL]
        return bool(found)

    await until(traced, 10.0, f"a prefill span of {request_id}", 0.05)
    return found[0]


async def test_a_decode_worker_answers_as_the_router_does_and_others_prefill(
    tmp_path: Path,
) -> None:
    async with suite(tmp_path, prefill_count=1, decode_count=2, settings=(DOOR,)) as it:
        endpoints = await http_endpoints(it)
        async with door(endpoints["decode-0"]) as one, door(endpoints["decode-1"]) as other:
            answers = [
                await client.chat.completions.create(
                    model="sim",
                    messages=messages("hello"),
                    max_tokens=8,
                    temperature=0,
                    extra_headers={"x-request-id": f"own-{number}"},
                )
                for number, client in enumerate((one, other))
            ]
            expected = await grpc_text(it, 8)
            assert [answer.choices[0].message.content for answer in answers] == [expected] * 2
            for number in range(2):
                assert await prefilled_on(it, f"own-{number}") == "prefill-0"
            await several_and_streamed(one)
        for name in ("decode-0", "decode-1"):
            await it.wait_empty(name)


async def several_and_streamed(client: openai.AsyncOpenAI) -> None:
    chat = await client.chat.completions.create(
        model="sim", messages=messages(QUESTION), max_tokens=5, n=3, seed=3
    )
    alone = [
        await client.chat.completions.create(
            model="sim", messages=messages(QUESTION), max_tokens=5, seed=3 + index
        )
        for index in range(3)
    ]
    assert [choice.message.content for choice in chat.choices] == [
        one.choices[0].message.content for one in alone
    ]
    stream = await client.chat.completions.create(
        model="sim", messages=messages(QUESTION), max_tokens=5, seed=3, stream=True
    )
    texts = [choice.delta.content or "" async for chunk in stream for choice in chunk.choices]
    assert "".join(texts) == alone[0].choices[0].message.content
    (model,) = (await client.models.list()).data
    assert model.id == "sim"


async def test_a_prompt_without_a_prefill_worker_is_prefilled_by_the_decode_worker(
    tmp_path: Path,
) -> None:
    async with suite(tmp_path, prefill_count=1, decode_count=1, settings=(DOOR,)) as it:
        async with door((await http_endpoints(it))["decode-0"]) as client:
            it.kill("prefill-0")
            await it.wait_joined(0, 1)
            answer = await client.chat.completions.create(
                model="sim", messages=messages("hello"), max_tokens=8, temperature=0
            )
        assert answer.choices[0].message.content == await grpc_text(it, 8)
        await it.wait_empty("decode-0")


async def test_a_closed_connection_frees_the_blocks(tmp_path: Path) -> None:
    settings = (DOOR, ("decode", "model", "sim:decode_step_s=0.02"))
    async with suite(tmp_path, prefill_count=1, decode_count=1, settings=settings) as it:
        async with door((await http_endpoints(it))["decode-0"]) as client:
            stream = await client.chat.completions.create(
                model="sim", messages=messages(QUESTION), max_tokens=2_000, stream=True
            )
            async for _ in stream:
                break
            await it.wait_running("decode-0")
            await stream.close()
        async with asyncio.timeout(WAIT_S):
            await it.wait_empty("decode-0")
