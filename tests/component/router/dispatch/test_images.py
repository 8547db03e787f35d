"""Images of a prompt reach every worker that runs it, and its prefixes are found by their content."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest import mock

import anthropic
import httpx2
import openai
import pytest

from headrace.inference.v1 import image_pb2, inference_pb2
from headrace_kv.prefix.images import hashed_token_ids
from headrace_text.hugging_face import HuggingFaceCodec
from tests.image_models import image_file, write_image_model
from tests.kit.router import Rig, text_of
from tests.kit.workers import TEXT, FakeDecode, fail, hand_over, recite, reply, sampling
from tests.waiting import until

REMOTE = inference_pb2.PREFILL_PLACEMENT_REMOTE
IMAGES = [image_file(56, 84), image_file(140, 56, "JPEG")]
URLS = [f"data:image/png;base64,{b64encode(image).decode()}" for image in IMAGES]


@pytest.fixture
async def rig(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Rig]:
    codec = HuggingFaceCodec(write_image_model(tmp_path))
    rig = await Rig(codec=codec, **getattr(request, "param", {})).start()
    yield rig
    await rig.close()


async def ask(
    rig: Rig, images: list[bytes] = IMAGES, **fields: Any
) -> list[inference_pb2.GenerateResponse]:
    parts = [image_pb2.ContentPart(image=image_pb2.Image(data=image)) for image in images]
    message = inference_pb2.ChatMessage(
        role="user", parts=[*parts, image_pb2.ContentPart(text="?")]
    )
    request = inference_pb2.GenerateRequest(
        chat=inference_pb2.Chat(messages=[message]),
        **{"prefill_placement": REMOTE, "sampling": sampling(), **fields},
    )
    return [response async for response in rig.stub.Generate(request, timeout=30)]


async def test_retries_migration_and_several_answers_keep_the_images(rig: Rig) -> None:
    await rig.add_decodes(recite(3, FakeDecode.die), recite(99))
    await rig.add_prefill(hand_over)
    responses = await ask(rig, n=2)
    for choice in range(2):
        assert text_of([one for one in responses if one.choice == choice]) == TEXT
    failing = await rig.add_prefill(fail("TRANSFER_FAILED"))
    for prefill in rig.prefills[:1]:
        await prefill.close()
    rig.prefills = [failing]
    assert text_of(await ask(rig)) == TEXT
    calls = [call for decode in rig.decodes for call in decode.requests]
    assert len(calls) >= 5
    assert any(call.generated_token_count for call in calls)
    for call in calls:
        assert [image.data for image in call.images] == IMAGES
    assert all(len(task.images) == 2 for task in failing.tasks)


async def test_prefixes_are_looked_up_by_the_content_of_images(rig: Rig) -> None:
    decode = await rig.add_decode(recite(99))
    prefixes = rig.router.prefixes.cached
    with mock.patch.object(
        type(prefixes), "cached_tokens", autospec=True, side_effect=type(prefixes).cached_tokens
    ) as looked_up:
        await ask(rig, generated=inference_pb2.TokenIds(ids=TEXT.encode()[:2]))
    (call,) = decode.requests
    words = [list(one.args[2]) for one in looked_up.call_args_list]
    assert words
    assert all(
        found == list(hashed_token_ids(list(call.token_ids), call.images)) for found in words
    )
    assert (await rig.route(text="a")).worker_id == "d0"


async def test_the_bytes_of_images_are_bounded(rig: Rig) -> None:
    """Images beyond the bound by themselves are admitted alone."""
    started = asyncio.Event()

    async def wait(worker: FakeDecode) -> None:
        started.set()
        await asyncio.Event().wait()

    rig.router.admission.images.pool.capacity = 2**20
    await rig.add_decode(recite(1, wait))
    large = image_file(form="JPEG", comment=b"x" * 60_000) + bytes(2**21)
    first = asyncio.create_task(ask(rig, [large], prefill_placement=0))
    await started.wait()
    admission = rig.router.admission
    assert admission.images.pool.used == 2**20
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    await until(lambda: admission.images.pool.used == 0)


async def test_clients_of_openai_and_anthropic_send_images(rig: Rig) -> None:
    decode = await rig.add_decode(reply("ok"))
    async with rig.http() as http:
        client = openai.AsyncOpenAI(base_url="http://router/v1", api_key="none", http_client=http)
        parts: list[Any] = [
            *({"type": "image_url", "image_url": {"url": url, "detail": "auto"}} for url in URLS),
            {"type": "text", "text": "?"},
        ]
        chat = await client.chat.completions.create(
            model="sim", messages=[{"role": "user", "content": parts}]
        )
        assert chat.choices[0].message.content == "ok"
        items: list[Any] = [
            *({"type": "input_image", "image_url": url, "detail": "auto"} for url in URLS),
            {"type": "input_text", "text": "?"},
        ]
        response = await client.responses.create(
            model="sim", input=[{"role": "user", "content": items}]
        )
        assert response.output_text == "ok"
        assert chat.usage is not None
        blocks: list[Any] = [
            *(
                {
                    "type": "image",
                    "source": {
                        "type": "base64",
                        "media_type": "image/png",
                        "data": b64encode(image).decode(),
                    },
                }
                for image in IMAGES
            ),
            {"type": "text", "text": "?"},
        ]
        messages = anthropic.AsyncAnthropic(
            base_url="http://router",
            api_key="none",
            http_client=rig.http(httpx2),
        ).messages
        user: Any = {"role": "user", "content": blocks}
        message = await messages.create(model="sim", max_tokens=9, messages=[user])
        assert message.content[0].type == "text"
        counted = await messages.count_tokens(model="sim", messages=[user])
    assert counted.input_tokens == chat.usage.prompt_tokens
    first, *others = decode.requests
    assert [image.data for image in first.images] == IMAGES
    assert len(others) == 2
    for call in others:
        assert call.token_ids == first.token_ids
        assert list(call.images) == list(first.images)
