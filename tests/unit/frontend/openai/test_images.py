"""Images in the bodies of all three chat APIs."""

from __future__ import annotations

import contextlib
import tracemalloc
from base64 import b64encode
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import pytest

from headrace_common.deadlines import Deadline
from headrace_frontend.openai.image_fetch import ImageFetcher
from headrace_frontend.openai.messages import ImageUrlBody
from headrace_text.hugging_face import HuggingFaceCodec
from tests.image_models import image_file, write_image_model
from tests.kit.openai_app import CONTEXT, LocalApp, Reply

IMAGE: Final = image_file(56, 84)
BASE64: Final = b64encode(IMAGE).decode()
URL: Final = f"data:image/png;base64,{BASE64}"
TOKENS: Final = 6


@pytest.fixture
def app(tmp_path: Path) -> LocalApp:
    return LocalApp(codec=HuggingFaceCodec(write_image_model(tmp_path)))


def part(url: str = URL, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **fields}}


def prompt_of(reply: Reply) -> str:
    """The prompt with one placeholder for each image. Checks the images."""
    assert reply.status == 200, reply.body
    (prepared,) = reply.prepared
    for image in prepared.images:
        assert (image.data, image.token_count) == (IMAGE, TOKENS)
    text = prepared.codec.decode(prepared.token_ids, skip_special_tokens=False)
    return text.replace("<|image|>" * TOKENS, "<|image|>").replace(
        "<|vision_start|><|image|><|vision_end|>", "IMAGE"
    )


def test_a_file_with_many_escapes_takes_little_memory() -> None:
    url = f"data:;base64,{'%41' * 400_000}"
    tracemalloc.start()
    data, (_, peak_bytes) = ImageUrlBody(url=url).data, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert data == bytes(300_000)
    assert peak_bytes < 10 * len(url)


@pytest.mark.parametrize(
    "image",
    [
        part(),
        part(detail="high"),
        {"type": "image_url", "image_url": URL},
        {"type": "input_image", "image_url": URL, "detail": "auto"},
        part(f"DATA:;base64,{BASE64}"),
        part("data:image/png;base64," + BASE64.replace("A", "A\n")),
        part("data:image/png;charset=utf-8;base64," + BASE64.replace("+", "%2B")),
    ],
)
async def test_a_chat_has_images(app: LocalApp, image: dict[str, Any]) -> None:
    content = [{"type": "text", "text": "What is "}, image, "?"]
    reply = await app.chat(messages=[{"role": "user", "content": content}])
    assert prompt_of(reply) == (
        "<|im_start|>user\nWhat is IMAGE?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert "x-headrace-ignored-fields" not in reply.headers


async def test_messages_have_images_also_in_the_results_of_tools(app: LocalApp) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": BASE64}
    image = {"type": "image", "source": source}
    content = [{"type": "text", "text": "r"}, image]
    result = {"type": "tool_result", "tool_use_id": "t", "content": content}
    use = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    messages = [
        {"role": "user", "content": [image, {"type": "text", "text": "a"}]},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result, {"type": "text", "text": "b"}]},
    ]
    body = {"model": "sim", "max_tokens": 5, "messages": messages}
    reply = await app.post("/v1/messages", body)
    assert prompt_of(reply) == (
        "<|im_start|>user\nIMAGEa<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n"
        "<|im_start|>tool\nr<|im_end|>\n<|im_start|>user\nIMAGEb<|im_end|>\n<|im_start|>assistant\n"
    )
    counted = await app.post("/v1/messages/count_tokens", body)
    assert counted.body == b'{"input_tokens": %d}' % len(reply.prepared[0].token_ids)


async def test_max_tokens_of_messages_leave_room_for_an_image(app: LocalApp) -> None:
    large = b64encode(image_file(28 * 20, 28 * 20)).decode()
    assert len(large) < 3_000
    source = {"type": "base64", "media_type": "image/png", "data": large}
    messages = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    for max_tokens in (5, 400):
        reply = await app.post("/v1/messages", {"max_tokens": max_tokens, "messages": messages})
        assert reply.status == 200, reply.body
        (prepared,) = reply.prepared
        left = CONTEXT - len(prepared.token_ids)
        assert prepared.sampling.max_tokens == min(max_tokens, left)


async def test_responses_have_images_also_in_the_outputs_of_functions(app: LocalApp) -> None:
    image = {"type": "input_image", "image_url": URL, "detail": "low"}
    text = {"type": "input_text", "text": "a"}
    items = [
        {"role": "user", "content": [text, image]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [text, image]},
    ]
    reply = await app.post("/v1/responses", {"model": "sim", "input": items})
    assert prompt_of(reply) == (
        "<|im_start|>user\naIMAGE<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n"
        "<|im_start|>tool\na<|im_end|>\n<|im_start|>user\nIMAGE<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_a_continued_conversation_has_its_images(app: LocalApp) -> None:
    content = [{"type": "input_image", "image_url": URL}]
    first = await app.post("/v1/responses", {"input": [{"role": "user", "content": content}]})
    assert first.status == 200, first.body
    response_id = first.body.decode().split('"id": "')[1].split('"')[0]
    again = await app.post("/v1/responses", {"input": "b", "previous_response_id": response_id})
    assert "user\nIMAGE<|im_end|>" in prompt_of(again)


async def test_tokenize_counts_images(app: LocalApp) -> None:
    plain = await app.post("/tokenize", {"messages": [{"role": "user", "content": ""}]})
    reply = await app.post("/tokenize", {"messages": [{"role": "user", "content": [part()]}]})
    counts = [int(one.body.split(b'"count": ')[1].split(b",")[0]) for one in (plain, reply)]
    assert counts[1] - counts[0] == TOKENS + 2


async def test_errors_have_the_names_of_openai(app: LocalApp) -> None:
    content = [{"type": "text", "text": "a"}, part("data:image/png;base64,AAAA")]
    reply = await app.chat(messages=[{"role": "user", "content": content}])
    assert reply.status == 400
    assert reply.error["param"] == "messages[0].content[1].image_url.url"
    reply = await app.chat(messages=[{"role": "system", "content": [part()]}])
    assert reply.error["param"] == "messages[0].content[0].image_url.url"
    assert "only a message of role user" in reply.error["message"]


@pytest.mark.parametrize("url", ["https://images.test/a.png", "file:///etc/passwd", "x"])
async def test_nothing_is_fetched_unless_a_host_is_listed(app: LocalApp, url: str) -> None:
    block = {"type": "image", "source": {"type": "url", "url": url}}
    messages = [{"role": "user", "content": [block]}]
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [part(url)]}]}),
        ("/v1/messages", {"max_tokens": 1, "messages": messages}),
        ("/tokenize", {"messages": [{"role": "user", "content": [part(url)]}]}),
    ):
        reply = await app.post(path, body)
        assert reply.status == 400
        assert b"messages[0].content[0].image_url.url" in reply.body
        assert b"data: URL" in reply.body


async def test_a_model_of_text_refuses_images_before_they_are_fetched() -> None:
    app = LocalApp(image_hosts=("images.test",))
    for url in (URL, "https://images.test/a.png"):
        reply = await app.chat(messages=[{"role": "user", "content": [part(url)]}])
        assert reply.status == 400
        assert "this model takes no images" in reply.error["message"]
        assert reply.error["param"] == "messages[0].content[0].image_url.url"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
async def test_an_image_is_fetched_once_the_request_is_admitted(
    app: LocalApp, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    steps: list[str] = []

    @contextlib.asynccontextmanager
    async def admitted(tenant: str, deadline: Deadline) -> AsyncIterator[None]:
        steps.append("admitted")
        yield
        steps.append("left")

    async def get(fetcher: ImageFetcher, url: str, room: object) -> bytes:
        steps.append(url)
        return IMAGE

    monkeypatch.setattr(app.runner, "admitted", admitted)
    monkeypatch.setattr(ImageFetcher, "_get", get)
    content = [part("https://images.test/a.png")]
    reply = await app.post(path, {"messages": [{"role": "user", "content": content}]})
    assert reply.status == 200, reply.body
    assert steps == ["admitted", "https://images.test/a.png", "left"]
