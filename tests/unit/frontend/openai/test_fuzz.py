"""Random bodies are answered or rejected. None is a bug."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from headrace_text.hugging_face import HuggingFaceCodec
from tests.fuzzed import BODIES, Fuzzer
from tests.image_models import write_image_model
from tests.kit.openai_app import LocalApp

SEEDS: Final = 400
# The event loop itself parses and prepares no more in virtual time.
BYTES_MAX: Final = 1_500


@pytest.mark.parametrize("images", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_no_body_fails_the_server(path: str, images: bool, tmp_path: Path) -> None:
    app = LocalApp(codec=HuggingFaceCodec(write_image_model(tmp_path)) if images else None)
    statuses: list[int] = []
    for seed in range(SEEDS):
        body = Fuzzer(seed).body(path)
        if len(body) + 6 * sum(map(body.count, b",[{")) < BYTES_MAX:
            reply = await app.post(path, body)
            statuses.append(reply.status)
            assert reply.status in (200, 400, 404), (seed, body, reply.body)
    assert {200, 400} <= set(statuses)
