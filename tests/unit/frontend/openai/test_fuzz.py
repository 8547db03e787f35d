"""Random bodies and messages are answered or rejected. None is a bug."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Final

import pytest

from headrace_common.errors import InvalidRequest
from headrace_engine.proto import sampling_from_proto
from headrace_engine.sim.model.sampling import SUPPORTED_FORMS, texts_of_form
from headrace_frontend.request.validation import prepare
from headrace_text.hugging_face import HuggingFaceCodec
from headrace_text.load import ByteCodec
from tests.fuzzed import BODIES, Fuzzer
from tests.image_models import write_image_model
from tests.unit.frontend.openai.local_app import CONTEXT, LocalApp

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


def test_no_message_fails_the_server_or_an_engine() -> None:
    codecs = {"sim": ByteCodec()}
    prepared = 0
    for seed in range(10 * SEEDS):
        request = Fuzzer(seed).request()
        with suppress(InvalidRequest):
            ready = prepare(request, request_id="r", codecs=codecs, max_model_len={"sim": CONTEXT})
            prepared += 1
            outputs = sampling_from_proto(ready.sampling, ready.stop_token_ids).structured_outputs
            if outputs is not None and outputs.kind in SUPPORTED_FORMS:
                assert [text.encode() for text in texts_of_form(outputs)], (seed, outputs)
    assert prepared > SEEDS
