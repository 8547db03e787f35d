"""Images of strangers through every door: accepted, or refused by name."""

from __future__ import annotations

import warnings
from base64 import b64encode
from collections import Counter
from io import BytesIO
from pathlib import Path
from typing import Any, Final

import pytest
from PIL import Image, ImageOps

from headrace.inference.v1 import inference_pb2
from headrace_common.errors import InvalidRequest
from headrace_text.hugging_face import HuggingFaceCodec
from headrace_text.images import ImageRejected, image_size, without_unused_parts
from tests.image_fuzz import fuzzed_images
from tests.image_models import write_image_model
from tests.kit.openai_app import LocalApp
from tests.kit.requests import prepared

COUNT: Final = 60


def bodies(data: bytes) -> dict[str, Any]:
    """The same request for each path."""
    encoded = b64encode(data).decode()
    url = f"data:image/png;base64,{encoded}"
    source = {"type": "base64", "media_type": "image/png", "data": encoded}
    openai = [{"role": "user", "content": [{"type": "image_url", "image_url": url}, "a"]}]
    text = {"type": "text", "text": "a"}
    anthropic = [{"role": "user", "content": [{"type": "image", "source": source}, text]}]
    items = [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]
    return {
        "/v1/chat/completions": {"messages": openai},
        "/tokenize": {"messages": openai},
        "/v1/messages": {"max_tokens": 5, "messages": anthropic},
        "/v1/messages/count_tokens": {"messages": anthropic},
        "/v1/responses": {"input": items},
    }


async def test_an_image_is_accepted_or_refused_by_name_at_every_door(tmp_path: Path) -> None:
    codec = HuggingFaceCodec(write_image_model(tmp_path))
    app, statuses = LocalApp(codec=codec, body_bytes_max=2**24), Counter[int]()
    for data in fuzzed_images(COUNT):
        found = set()
        for path, body in bodies(data).items():
            reply = await app.post(path, body)
            found.add(reply.status)
            assert reply.status == 200 or b"image" in reply.body or not data, reply.body
        request = inference_pb2.GenerateRequest()
        message = request.chat.messages.add(role="user")
        message.parts.add().image.data = data
        message.parts.add(text="a")
        try:
            prepared(request, codec, 16_384)
        except InvalidRequest:
            found.add(400)
        else:
            found.add(200)
        assert len(found) == 1
        statuses += Counter(found)
    assert min(statuses[200], statuses[400]) > COUNT // 5


@pytest.mark.parametrize("seed", [1, 2])
def test_a_size_is_that_of_the_decoder(seed: int) -> None:
    compared = 0
    for data in fuzzed_images(COUNT, seed):
        try:
            found, decoded = image_size(data), without_unused_parts(data)
        except ImageRejected:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                size = ImageOps.exif_transpose(Image.open(BytesIO(decoded))).size
            except Exception:  # noqa: BLE001 - a decoder's errors for broken files are of many types
                continue
        compared += 1
        assert found == size
    assert compared > COUNT // 4
