"""Images of chats: their bounds, their placeholders, and what prefixes are hashed from."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest

from headrace.inference.v1 import image_pb2, inference_pb2
from headrace_common.errors import InvalidRequest
from headrace_frontend.request import images
from headrace_kv.prefix.images import content_hash, hashed_token_ids
from headrace_text.codec import TextCodec
from headrace_text.hugging_face import HuggingFaceCodec
from headrace_text.load import ByteCodec
from tests.image_models import IMAGE, image_file, write_image_model
from tests.kit.requests import prepared

RED, BLUE = image_file(56, 84), image_file(140, 56, "JPEG", "blue")


@pytest.fixture
def codec(tmp_path: Path) -> TextCodec:
    return HuggingFaceCodec(write_image_model(tmp_path))


def part(content: str | bytes) -> image_pb2.ContentPart:
    if isinstance(content, str):
        return image_pb2.ContentPart(text=content)
    return image_pb2.ContentPart(image=image_pb2.Image(data=content))


def request_of(*contents: str | bytes, role: str = "user") -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest()
    request.chat.messages.add(role=role, parts=map(part, contents))
    return request


def violations(request: inference_pb2.GenerateRequest, codec: TextCodec) -> dict[str, str]:
    with pytest.raises(InvalidRequest) as caught:
        prepared(request, codec, 600)
    return dict(caught.value.violations)


def test_a_placeholder_becomes_as_many_as_the_image_has_tokens(codec: TextCodec) -> None:
    found = prepared(request_of("a", RED, "b", BLUE), codec, 600)
    red, blue = found.images
    assert (red.token_count, blue.token_count) == (2 * 3, 5 * 2)
    assert [image.content_hash for image in found.images] == [content_hash(RED), content_hash(BLUE)]
    assert [image.data for image in found.images] == [RED, BLUE]
    assert found.token_ids.count(IMAGE) == 16
    for image in found.images:
        end = image.start_token + image.token_count
        assert found.token_ids[image.start_token : end] == array("I", [IMAGE]) * image.token_count
        text = codec.decode(found.token_ids[image.start_token - 1 :][:1], skip_special_tokens=False)
        assert text == "<|vision_start|>"
    assert found.image_bytes == len(RED) + len(BLUE)


def test_prefixes_depend_on_the_content_of_images(codec: TextCodec) -> None:
    first, again, other = (
        prepared(request_of("a", image), codec, 600)
        for image in (RED, RED, image_file(56, 84, color="green"))
    )
    assert first.token_ids == other.token_ids
    assert first.prefix_ids == again.prefix_ids == hashed_token_ids(first.token_ids, first.images)
    assert first.prefix_ids != other.prefix_ids
    start = first.images[0].start_token
    assert first.prefix_ids[:start] == other.prefix_ids[:start]


def test_a_prompt_without_images_is_not_copied(codec: TextCodec) -> None:
    found = prepared(request_of("a", "b"), codec, 600)
    assert found.prefix_ids is found.token_ids
    assert not found.images
    plain = inference_pb2.GenerateRequest()
    plain.chat.messages.add(role="user", content="a\nb")
    assert prepared(plain, codec, 600).token_ids == found.token_ids


def test_images_count_in_the_context(codec: TextCodec) -> None:
    large = image_file(28 * 30, 28 * 30)
    assert "900 tokens" not in violations(request_of(large), codec)["chat.messages"]
    assert "context length is 600 tokens" in violations(request_of(large), codec)["chat.messages"]


def test_a_model_of_text_refuses_images_by_field(tmp_path: Path) -> None:
    path = "chat.messages[0].parts[1].image"
    assert violations(request_of("a", RED), ByteCodec()) == {
        path: "this model takes no images; send text only"
    }
    codec = HuggingFaceCodec(write_image_model(tmp_path, {"model_type": "x", "vision_config": {}}))
    assert violations(request_of("a", RED), codec) == {
        path: "images of model type x are not supported; send text only"
    }


@pytest.mark.parametrize("role", ["system", "assistant", "tool", "developer"])
def test_only_users_send_images(codec: TextCodec, role: str) -> None:
    found = violations(request_of("a", RED, role=role), codec)
    assert found == {"chat.messages[0].parts[1].image": "only a message of role user has images"}


def test_parts_are_bounded_and_whole(codec: TextCodec) -> None:
    path = "chat.messages[0].parts"
    assert "at most 64 parts, not 65" in violations(request_of(*["a"] * 65), codec)[path]
    empty = inference_pb2.GenerateRequest()
    empty.chat.messages.add(role="user", content="a", parts=[image_pb2.ContentPart()])
    assert violations(empty, codec) == {
        "chat.messages[0].content": "excludes parts; leave out one of them",
        f"{path}[0]": "set one of text and image",
    }
    assert "must not be empty" in violations(request_of(b""), codec)[f"{path}[0].image.data"]
    assert "is no image" in violations(request_of(b"x"), codec)[f"{path}[0].image"]
    continued = request_of("a", RED)
    continued.chat.continue_final_message = True
    assert "chat.continue_final_message" in violations(continued, codec)
    flat = violations(request_of(image_file(2_001, 10)), codec)[f"{path}[0].image"]
    assert "one side may be 200 times the other" in flat


def test_images_are_bounded(codec: TextCodec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "IMAGE_BYTES_MAX", len(BLUE) - 1)
    monkeypatch.setattr(images, "IMAGES_BYTES_MAX", 2 * len(RED))
    monkeypatch.setattr(images, "IMAGES_MAX", 2)
    paths = [f"chat.messages[0].parts[{number}].image" for number in range(3)]
    assert list(violations(request_of(BLUE), codec)) == [f"{paths[0]}.data"]
    assert prepared(request_of(RED, RED), codec, 600).images
    assert "together" in violations(request_of(RED, RED + b"x"), codec)[paths[1]]
    assert "at most 2 images" in violations(request_of(*[RED] * 3), codec)[paths[2]]


def test_a_template_without_images_is_named(tmp_path: Path) -> None:
    folder = write_image_model(tmp_path)
    (folder / "chat_template.jinja").write_text("{{ messages[-1].content | length }}")
    found = violations(request_of("a", RED), HuggingFaceCodec(folder))
    assert "the chat template leaves it out" in found["chat.messages[0].parts[1].image"]
    (folder / "chat_template.jinja").write_text("<|image|>")
    found = violations(request_of("a", RED), HuggingFaceCodec(folder))
    assert "must not end with an image" in found["chat.messages"]


def test_the_pixels_of_a_request_are_bounded(
    codec: TextCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images, "IMAGES_PIXELS_MAX", 56 * 84 * 2)
    assert len(prepared(request_of(RED, RED, "a"), codec, 600).images) == 2
    found = violations(request_of(RED, RED, RED, "a"), codec)
    assert "scale them down" in found["chat.messages[0].parts[2].image"]
