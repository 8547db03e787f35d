"""The OpenAI HTTP API with a real model."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest

from headrace.inference.v1 import inference_pb2, sampling_pb2
from tests.devices import DEVICES, require, shared
from tests.kit.examples import run_example
from tests.ports import free_port
from tests.suite.deployment import Suite, suite
from tests.vllm.conftest import RunJob

MODEL = "SmolLM2-135M-Instruct"
PROMPTS = (
    "What is the capital of France?",
    "Name three colours, in one line. Ünïcödé: 你好.",
    "Write one sentence about rivers.",
)
TOKENS = 24
pytestmark = [
    pytest.mark.core,
    pytest.mark.timeout(280),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.mark.parametrize("device", DEVICES)
def test_text_over_http_equals_that_of_grpc_and_of_vllm_alone(
    device: str, tmp_path: Path, run_job: RunJob
) -> None:
    require(device)
    plain = run_job("tests.vllm.plain:chat_texts", model=MODEL, prompts=PROMPTS, max_tokens=TOKENS)
    served, scored = asyncio.run(use(tmp_path, device))
    for ours, vllms in zip(scored, plain["prompt_logprobs"], strict=True):
        assert_same_scores(ours, vllms)
    assert served == [(text, text, text) for text in plain["texts"]]
    assert "Paris" in plain["texts"][0]


def assert_same_scores(ours: list[Any], vllms: list[Any]) -> None:
    """Of the tokens of a prompt and their alternatives. Equally likely ones may be in another order."""
    assert ours[0] is vllms[0] is None
    assert len(ours) == len(vllms) > 2
    for one, other in zip(ours[1:], vllms[1:], strict=True):
        assert one.keys() == other.keys()
        for token, (logprob, rank) in other.items():
            assert one[token]["logprob"] == pytest.approx(logprob, abs=1e-3)
            assert one[token]["rank"] == rank


WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Paris"]}, "days": {"enum": [1, 2]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


async def use(folder: Path, device: str) -> tuple[list[tuple[str, str, str]], list[list[Any]]]:
    """The text over HTTP, streamed over HTTP, and over gRPC, for each prompt. Then the `prompt_logprobs` of each.

    Also asks for forms and tokens.
    """
    listen = f"127.0.0.1:{free_port()}"
    settings = (
        ("router", "http_listen", listen),
        *shared(device, dtype="float32", max_model_len=512, engine_args="--enforce-eager"),
    )
    async with (
        suite(
            folder, decode_count=2, engine="vllm", model=f"models/{MODEL}", settings=settings
        ) as it,
        openai.AsyncOpenAI(base_url=f"http://{listen}/v1", api_key="none", timeout=60) as client,
    ):
        texts = [await texts_of(it, client, prompt) for prompt in PROMPTS]
        scores = [await scores_of(client, prompt) for prompt in PROMPTS]
        await check_forms(client)
        await check_tokens(client)
        await check_choices(client)
        await check_usage_and_cancel(it, client)
        assert "weather {'city': " in await run_example("chat.py", listen)
    return texts, scores


async def scores_of(client: openai.AsyncOpenAI, prompt: str) -> list[Any]:
    """The `prompt_logprobs` of a prompt, the same the second time, and in an echo."""
    fields: dict[str, Any] = {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 1}
    found: list[list[Any]] = []
    for _ in range(2):
        scored = await client.completions.create(**fields, extra_body={"prompt_logprobs": 2})
        found.append((scored.choices[0].model_extra or {})["prompt_logprobs"])
        assert scored.usage is not None
        assert scored.usage.prompt_tokens_details is not None
        assert scored.usage.prompt_tokens_details.cached_tokens == 0
    echo = await client.completions.create(**fields, echo=True, logprobs=2)
    assert echo.choices[0].text.startswith(prompt)
    logprobs = echo.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    own = [next(iter(row.values()))["logprob"] for row in found[0][1:]]
    again = [next(iter(row.values()))["logprob"] for row in found[1][1:]]
    assert again == pytest.approx(own, abs=1e-3)
    assert logprobs.token_logprobs[1:-1] == pytest.approx(own, abs=1e-3)
    return found[0]


async def texts_of(it: Suite, client: openai.AsyncOpenAI, prompt: str) -> tuple[str, str, str]:
    fields: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": prompt}],
        "max_completion_tokens": TOKENS,
        "temperature": 0,
    }
    whole = await client.chat.completions.create(**fields)
    parts = [
        chunk.choices[0].delta.content or ""
        async for chunk in await client.chat.completions.create(**fields, stream=True)
    ]
    messages = [inference_pb2.ChatMessage(role="user", content=prompt)]
    sampling = sampling_pb2.SamplingParams(max_tokens=TOKENS, temperature=0)
    request = inference_pb2.GenerateRequest(
        chat=inference_pb2.Chat(messages=messages), sampling=sampling
    )
    over_grpc = (await it.ask(request, 60)).text
    return whole.choices[0].message.content or "", "".join(parts), over_grpc


async def check_forms(client: openai.AsyncOpenAI) -> None:
    """A small model keeps the form of a schema, and calls the function that it must call."""
    schema = WEATHER["function"]["parameters"]
    fields: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "The weather of two days in Paris?"}],
        "max_completion_tokens": 64,
        "temperature": 0,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "weather", "schema": schema}}
    answer = await client.chat.completions.create(**fields, response_format=form)
    assert set(json.loads(answer.choices[0].message.content or "")) == {"city", "days"}
    called = await client.chat.completions.create(
        **fields, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False
    )
    (call,) = called.choices[0].message.tool_calls or ()  # type: ignore[misc]
    assert call.type == "function"
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("Rome", "Paris")


async def check_tokens(client: openai.AsyncOpenAI) -> None:
    """A special token's text becomes the token, and a text becomes the tokens of its answer."""
    answer = await client.completions.create(
        model=MODEL, prompt="1, 2, 3, 4,", max_tokens=1, temperature=0, logit_bias={"28": 100}
    )
    text = answer.choices[0].text
    body = {"prompt": text, "add_special_tokens": False}
    url = str(client.base_url).replace("/v1/", "/tokenize")
    tokens = await client.post(url, cast_to=object, body=body)
    assert tokens == {"count": 1, "max_model_len": 512, "tokens": [28], "token_strs": None}


async def check_choices(client: openai.AsyncOpenAI) -> None:
    """Three choices, each with the log probabilities of its own tokens."""
    answer = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": PROMPTS[1]}],
        max_completion_tokens=8,
        n=3,
        seed=7,
        temperature=1.5,
        logprobs=True,
        top_logprobs=2,
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) > 1
    for choice in answer.choices:
        assert choice.logprobs is not None
        for token in choice.logprobs.content or ():
            assert token.logprob <= 0
            assert len(token.top_logprobs) == 2
    assert answer.usage is not None
    assert answer.usage.completion_tokens == sum(
        len(choice.logprobs.content or ()) for choice in answer.choices if choice.logprobs
    )


async def check_usage_and_cancel(it: Suite, client: openai.AsyncOpenAI) -> None:
    """A streamed answer ends with its usage. The blocks of one that its client leaves become free."""
    fields: Any = {
        "model": MODEL,
        "messages": [{"role": "user", "content": PROMPTS[2]}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "extra_body": {"ignore_eos": True},
    }
    chunks = [
        chunk
        async for chunk in await client.chat.completions.create(**fields, max_completion_tokens=6)
    ]
    assert not chunks[-1].choices
    assert chunks[-1].usage.completion_tokens == 6
    stream = await client.chat.completions.create(**fields, max_completion_tokens=400)
    async for _ in stream:
        break
    await stream.close()
    for name in ("decode-0", "decode-1"):
        await it.wait_empty(name)
