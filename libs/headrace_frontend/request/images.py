"""The images of a chat: their bounds, and their placeholders in the prompt's tokens. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import TypeAlias

from headrace.inference.v1 import image_pb2, inference_pb2
from headrace_common.errors import InvalidRequest
from headrace_common.limits import (
    CHAT_PARTS_MAX,
    IMAGE_BYTES_MAX,
    IMAGES_BYTES_MAX,
    IMAGES_MAX,
)
from headrace_kv.prefix.images import content_hash
from headrace_text.codec import ChatMessage, TextCodec
from headrace_text.images import IMAGES_PIXELS_MAX, ImageRejected, ImageRule, image_size

_PARTS = attrgetter("parts")
PromptImages: TypeAlias = tuple[image_pb2.PromptImage, ...]
# See headrace_frontend.request.chat.plain_messages.
PlainMessages: TypeAlias = Sequence[ChatMessage | None]


def images_of(chat: inference_pb2.Chat, plain: PlainMessages) -> Iterator[tuple[str, bytes]]:
    """The path and the file of each image."""
    for index, message in enumerate(plain):
        if message is None:
            for number, part in enumerate(chat.messages[index].parts):
                if part.HasField("image"):
                    yield f"chat.messages[{index}].parts[{number}].image", part.image.data


def has_image(message: inference_pb2.ChatMessage) -> bool:
    """Whether a message has an image."""
    return any(part.HasField("image") for part in message.parts)


def has_images(chat: inference_pb2.Chat) -> bool:
    """Whether a message has an image. Few have parts, which are read faster than asked for images."""
    return any(map(has_image, filter(_PARTS, chat.messages)))


def part_violations(path: str, message: inference_pb2.ChatMessage) -> Iterator[tuple[str, str]]:
    """Path of the invalid field and remedy, for the parts of the message at `path`."""
    count = len(message.parts)
    if count and message.content:
        yield f"{path}.content", "excludes parts; leave out one of them"
    if count > CHAT_PARTS_MAX:
        yield f"{path}.parts", f"must hold at most {CHAT_PARTS_MAX} parts, not {count}"
        return
    for number, part in enumerate(message.parts):
        if part.WhichOneof("part") is None:
            yield f"{path}.parts[{number}]", "set one of text and image"
        elif part.HasField("image") and message.role != "user":
            yield f"{path}.parts[{number}].image", "only a message of role user has images"


def image_violations(chat: inference_pb2.Chat, plain: PlainMessages) -> dict[str, str]:
    """Remedies by path of the invalid field. Needs no knowledge of the model."""
    total_bytes = 0
    for count, (path, data) in enumerate(images_of(chat, plain), 1):
        total_bytes += len(data)
        if count > IMAGES_MAX:
            return {path: f"a request may have at most {IMAGES_MAX} images; leave some out"}
        if not data:
            return {f"{path}.data": "must not be empty"}
        if len(data) > IMAGE_BYTES_MAX:
            remedy = f"has {len(data)} bytes, and at most {IMAGE_BYTES_MAX} are allowed; scale the image down"
            return {f"{path}.data": remedy}
        if total_bytes > IMAGES_BYTES_MAX:
            return {
                path: f"the images up to this one have {total_bytes} bytes, and at most {IMAGES_BYTES_MAX} "
                "are allowed together; scale them down"
            }
    return {}


def with_placeholders(
    token_ids: array[int], chat: inference_pb2.Chat, plain: PlainMessages, rule: ImageRule
) -> tuple[array[int], PromptImages]:
    """The tokens of a chat with as many placeholders as each image has tokens, and the images.

    The template has written one placeholder for each. Raises InvalidRequest.
    """
    expanded, placed, read, pixels = array("I"), [], 0, 0
    for path, data in images_of(chat, plain):
        try:
            width, height = image_size(data)
            count = rule.tokens_of(width, height)
        except ImageRejected as error:
            raise InvalidRequest({path: str(error)}) from None
        pixels += width * height
        if pixels > IMAGES_PIXELS_MAX:
            raise InvalidRequest({path: too_many_pixels(pixels)})
        try:
            found = token_ids.index(rule.token_id, read)
        except ValueError:
            raise InvalidRequest(
                {path: "the chat template leaves it out; send it in another message"}
            ) from None
        expanded += token_ids[read:found]
        image = image_pb2.PromptImage(
            data=data, content_hash=content_hash(data), start_token=len(expanded), token_count=count
        )
        placed.append(image)
        expanded += array("I", (rule.token_id,)) * count
        read = found + 1
    if placed and read == len(token_ids):
        # A worker computes the last token by itself.
        raise InvalidRequest({"chat.messages": "must not end with an image; send text after it"})
    return expanded + token_ids[read:], tuple(placed)


def too_many_pixels(pixels: int) -> str:
    """The remedy for the images of one request."""
    return (
        f"the images up to this one have {pixels} pixels, and at most {IMAGES_PIXELS_MAX} are allowed together; "
        "scale them down"
    )


def rule_for(chat: inference_pb2.Chat, plain: PlainMessages, codec: TextCodec) -> ImageRule | None:
    """The model's rule for the images of a chat. None for a chat without images. Raises InvalidRequest."""
    path = next((path for path, _ in images_of(chat, plain)), None)
    if path is None:
        return None
    if codec.images is None:
        raise InvalidRequest({path: refusal(codec)})
    return codec.images


def refusal(codec: TextCodec) -> str:
    """The remedy for an image that a model does not take."""
    return f"{codec.images_refusal or 'this model takes no images'}; send text only"
