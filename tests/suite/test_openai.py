"""OpenAI's own client, and raw HTTP, against a deployment of processes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from headrace.inference.v1 import inference_pb2, sampling_pb2
from headrace_cli.commands.trace import conversation_turns
from headrace_common.errors import NotFound
from tests.ports import free_port
from tests.suite.deployment import Suite, greedy, prompt_of, suite

MESSAGES: Any = [{"role": "user", "content": "hello"}]
WAIT_S = 20.0
KEY = "the-key-of-a-tenant"


@asynccontextmanager
async def served(
    folder: Path, *settings: tuple[str, str, str], key: str = "none", decode_count: int = 1
) -> AsyncIterator[tuple[Suite, openai.AsyncOpenAI]]:
    listen = f"127.0.0.1:{free_port()}"
    every = (("router", "http_listen", listen), *settings)
    async with (
        suite(folder, settings=every, decode_count=decode_count) as it,
        openai.AsyncOpenAI(
            base_url=f"http://{listen}/v1", api_key=key, max_retries=0, timeout=WAIT_S
        ) as client,
    ):
        yield it, client


async def raw(client: openai.AsyncOpenAI, data: bytes, wait_s: float = WAIT_S) -> bytes:
    """All that the server answers to bytes on a connection, until it closes that."""
    assert client.base_url.host
    assert client.base_url.port
    reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
    try:
        writer.write(data)
        async with asyncio.timeout(wait_s):
            return await reader.read()
    finally:
        writer.close()


def post(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: localhost", "connection: close", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def get(path: str, *headers: str) -> bytes:
    lines = [f"GET {path} HTTP/1.1", "host: localhost", "connection: close", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


async def grpc_text(it: Suite, count: int, seed: int | None = None) -> str:
    chat = inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user", content="hello")])
    sampling = sampling_pb2.SamplingParams(max_tokens=count, temperature=0)
    if seed is not None:
        sampling = sampling_pb2.SamplingParams(max_tokens=count, seed=seed)
    return (await it.ask(inference_pb2.GenerateRequest(chat=chat, sampling=sampling))).text


@pytest.mark.core
async def test_the_official_client_gets_the_same_text_as_grpc(tmp_path: Path) -> None:
    async with served(tmp_path) as (it, client):
        (model,) = (await client.models.list()).data
        assert (model.id, model.owned_by) == ("sim", "headrace")
        chat = await client.chat.completions.create(
            model="sim", messages=MESSAGES, max_completion_tokens=8, temperature=0
        )
        expected = await grpc_text(it, 8)
        assert chat.choices[0].message.content == expected
        assert chat.choices[0].finish_reason == "length"
        assert chat.usage is not None
        assert chat.usage.completion_tokens == 8
        fingerprints = {chat.system_fingerprint}
        texts: list[str] = []
        usages: list[openai.types.CompletionUsage | None] = []
        async for chunk in await client.chat.completions.create(
            model="sim",
            messages=MESSAGES,
            max_completion_tokens=8,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        ):
            usages.append(chunk.usage)
            fingerprints.add(chunk.system_fingerprint)
            texts += [choice.delta.content or "" for choice in chunk.choices]
        assert "".join(texts) == expected
        assert usages[-1] is not None
        assert usages[-1].total_tokens == chat.usage.total_tokens
        completion = await client.completions.create(
            model="sim", prompt=["a", "b"], n=2, max_tokens=3, seed=1
        )
        assert [choice.index for choice in completion.choices] == [0, 1, 2, 3]
        assert completion.usage is not None
        assert completion.usage.completion_tokens == 12
        (fingerprint,) = fingerprints | {completion.system_fingerprint}
        assert fingerprint
        assert fingerprint.startswith("fp_")
        with pytest.raises(openai.NotFoundError) as unsupported:
            await client.embeddings.create(model="sim", input="x")
        assert unsupported.value.code == "unsupported_endpoint"
        assert (await client.models.retrieve("sim")).id == "sim"
        head = await raw(client, get("/v1/models/").replace(b"GET", b"HEAD"))
        assert head.startswith(b"HTTP/1.1 200 ")
        assert head.endswith(b"\r\n\r\n")
        answer = await raw(client, get("/v1/completions"))
        assert answer.startswith(b"HTTP/1.1 405 ")
        assert b"allow: POST" in answer
        for path in ("/metrics", "/ready"):
            assert (await raw(client, get(path))).startswith(b"HTTP/1.1 200 ")


async def test_a_conversation_continues_on_another_router_and_over_grpc(tmp_path: Path) -> None:
    async with served(tmp_path) as (it, client):
        other = await it.add("router-1", "router", f"--http-listen=127.0.0.1:{free_port()}")
        options: Any = {"model": "sim", "max_output_tokens": 8, "temperature": 0}
        first = await client.responses.create(input="hello", **options)
        async with it.through(other) as far:
            await far.wait_joined(1, 1)
            sampling = sampling_pb2.SamplingParams(max_tokens=8, temperature=0)

            async def turn(text: str, resume: str, own: str) -> str:
                chat = inference_pb2.Chat(
                    messages=[inference_pb2.ChatMessage(role="user", content=text)]
                )
                request = inference_pb2.GenerateRequest(
                    chat=chat, sampling=sampling, resume=resume, request_id=own, store=True
                )
                return (await far.ask(request)).text

            second = await turn("and now?", first.id, "second")
            with pytest.raises(NotFound, match="send all of its messages"):
                await turn("and now?", "lost", "third")
        third = await client.responses.create(
            input="go on", previous_response_id="second", **options
        )
        history: Any = [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": first.output_text},
            {"role": "user", "content": "and now?"},
        ]
        assert second == await whole_text(client, history)
        history += [{"role": "assistant", "content": second}, {"role": "user", "content": "go on"}]
        assert third.output_text == await whole_text(client, history)
        turns = await conversation_turns(it.operator, first.id)
        assert [turn.answer_tokens for turn in turns] == [8]
        assert [turn.request_id for turn in await conversation_turns(it.operator, "second")] == [
            third.id.removeprefix("resp_")
        ]
        with pytest.raises(openai.NotFoundError) as raised:
            await client.responses.create(input="x", previous_response_id="lost", **options)
        assert raised.value.code == "previous_response_not_found"


async def whole_text(client: openai.AsyncOpenAI, messages: Any) -> str | None:
    chat = await client.chat.completions.create(
        model="sim", messages=messages, max_completion_tokens=8, temperature=0
    )
    return chat.choices[0].message.content


@pytest.mark.core
async def test_messages_and_responses_are_the_same_chat(tmp_path: Path) -> None:
    function: Any = {"name": "weather", "parameters": TOOLS[0]["function"]["parameters"]}
    tools: Any = [{"type": "function", "strict": False, **function}]
    async with served(tmp_path) as (it, client):
        expected = await grpc_text(it, 8)
        response = await client.responses.create(
            model="sim", input="hello", max_output_tokens=8, temperature=0
        )
        assert response.output_text == expected
        assert response.status == "incomplete"
        async with client.responses.stream(
            model="sim", input="hello", tools=tools, tool_choice="required"
        ) as responses:
            final = await responses.get_final_response()
        (call,) = (item for item in final.output if item.type == "function_call")
        assert set(json.loads(call.arguments)) == {"city", "days"}
        base = str(client.base_url).removesuffix("/v1/")
        async with anthropic.AsyncAnthropic(base_url=base, api_key="none", max_retries=0) as other:
            answer = await other.messages.create(
                model="sim", messages=MESSAGES, max_tokens=8, extra_body={"temperature": 0}
            )
            assert [block.text for block in answer.content if block.type == "text"] == [expected]
            assert answer.stop_reason == "max_tokens"
            counted = await other.messages.count_tokens(model="sim", messages=MESSAGES)
            assert counted.input_tokens == answer.usage.input_tokens
            tool: Any = {"name": "weather", "input_schema": function["parameters"]}
            named: Any = {"type": "tool", "name": "weather"}
            async with other.messages.stream(
                model="sim", messages=MESSAGES, max_tokens=2_000, tools=[tool], tool_choice=named
            ) as messages:
                message = await messages.get_final_message()
            (use,) = (block for block in message.content if block.type == "tool_use")
            assert isinstance(use.input, dict)
            assert set(use.input) == {"city", "days"}
            with pytest.raises(anthropic.NotFoundError):
                await other.messages.create(model="other", messages=MESSAGES, max_tokens=8)


TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city", "days"],
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]


async def test_a_closed_connection_frees_the_blocks(tmp_path: Path) -> None:
    slow = ("decode", "model", "sim:decode_step_s=0.02")
    async with served(tmp_path, slow) as (it, client):
        stream = await client.chat.completions.create(
            model="sim", messages=MESSAGES, max_tokens=2_000, stream=True, n=2
        )
        seen: set[int] = set()
        async for chunk in stream:
            seen |= {choice.index for choice in chunk.choices}
            if len(seen) == 2:
                break
        # As in vLLM, several answers are one request.
        assert (await raw(client, get("/load"))).endswith(b'{"server_load": 1}')
        await stream.close()
        # The answers would take 40 s.
        await it.wait_empty("decode-0", 10.0)
        assert (await raw(client, get("/load"))).endswith(b'{"server_load": 0}')


@pytest.mark.core
async def test_keys_come_before_bodies(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"{KEY} tenant\n")
    readers = tmp_path / "readers"
    readers.write_text("the-key-of-a-reader scraper\n")
    settings = (
        ("router", "api_keys_file", str(keys)),
        ("router", "metrics_keys_file", str(readers)),
    )
    async with served(tmp_path, *settings, key=KEY) as (_, client):
        assert (await client.models.list()).data
        stranger = client.with_options(api_key="wrong")
        for call in (
            stranger.models.list(),
            stranger.chat.completions.create(model="sim", messages=MESSAGES),
        ):
            with pytest.raises(openai.AuthenticationError, match="Authorization: Bearer"):
                await call
        # The body of a stranger is not received.
        path, json_type = "/v1/completions", "content-type: application/json"
        unread = await raw(client, post(path, b"", json_type, "content-length: 50000"))
        assert unread.startswith(b"HTTP/1.1 401 ")
        mine = f"authorization: Bearer {KEY}"
        # A key of one kind is none of the other.
        for headers in ((), (mine,)):
            assert (await raw(client, get("/metrics", *headers))).startswith(b"HTTP/1.1 401 ")
        reader = "authorization: Bearer the-key-of-a-reader"
        for path in ("/v1/models", "/load"):
            assert (await raw(client, get(path, reader))).startswith(b"HTTP/1.1 401 ")
        metrics = await raw(client, get("/metrics", reader))
        assert metrics.startswith(b"HTTP/1.1 200 ")
        assert b"headrace_requests_total{" in metrics


async def test_an_echo_scores_the_prompt_as_its_tokens_were_generated(tmp_path: Path) -> None:
    prompt = prompt_of(150, 7)
    async with served(tmp_path) as (it, client):
        answer = await it.ask(greedy(prompt, 8, logprobs=2))
        assert answer.last.timing.prefill_worker_id
        whole = [*prompt, *answer.token_ids]
        echo: Any = {"model": "sim", "prompt": [whole, whole], "echo": True, "temperature": 0}
        completion = await client.completions.create(**echo, max_tokens=1, logprobs=2)
        first, second = completion.choices
        assert first.logprobs is not None
        assert first.logprobs == second.logprobs
        found = first.logprobs.token_logprobs
        assert found is not None
        assert found[0] is None
        assert found[150:-1] == [entry.logprob for entry in answer.logprobs]
        assert len(found) == len(whole) + 1
        assert completion.usage is not None
        assert completion.usage.completion_tokens == 2
        assert completion.usage.prompt_tokens_details is not None
        assert completion.usage.prompt_tokens_details.cached_tokens == 0
        parts = [
            chunk.choices[0]
            async for chunk in await client.completions.create(
                **echo | {"prompt": whole}, max_tokens=1, logprobs=2, stream=True
            )
        ]
        streamed = [
            value for part in parts if part.logprobs for value in part.logprobs.token_logprobs or ()
        ]
        assert streamed == found
        assert "".join(part.text for part in parts) == first.text
        alone = await client.completions.create(**echo, max_tokens=0, logprobs=2)
        assert alone.choices[0].logprobs is not None
        assert alone.choices[0].logprobs.token_logprobs == streamed[:-1]
        request = greedy(whole, 1, prompt_logprobs=0)
        scored: list[float] = []
        async for response in it.client.generate(request, WAIT_S):
            scored += [entry.logprob for entry in response.prompt_logprobs]
        assert scored == streamed[1:-1]
        extra = {"prompt_logprobs": 1}
        chat = await client.chat.completions.create(
            model="sim", messages=MESSAGES, max_tokens=1, extra_body=extra
        )
        rows: Any = (chat.model_extra or {})["prompt_logprobs"]
        assert chat.usage is not None
        assert (rows[0], len(rows)) == (None, chat.usage.prompt_tokens)
        await it.wait_empty("decode-0")
