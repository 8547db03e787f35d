"""A stranger's texts, messages and bodies are rejected at a bounded cost, and the streams of others go on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.security.bystander import STEP_S, attack, bystander
from tests.security.text_model import CONTEXT_TOKENS, write_text_model
from tests.suite.deployment import Suite, suite
from tests.suite.loop_lag import measured_loop_lag

KEY = "the-key-of-the-bystander"
STRANGER_KEY = "the-key-of-the-stranger"
STALL_MAX_S = 1.0
GROWTH_BYTES_MAX = 128 * 1024 * 1024
STATUSES = {
    "long_texts": [
        *["INVALID_ARGUMENT text: has "] * 6,
    ],
    "messages": [
        "INVALID_ARGUMENT chat.messages: ",
        "INVALID_ARGUMENT request: has ",
        "INVALID_ARGUMENT chat.messages: must hold at most 2048 messages",
    ],
    "stops": [
        "RESOURCE_EXHAUSTED SERVER: Received message larger than max",
        "INVALID_ARGUMENT sampling.stop[0]: must have at most 256 characters",
    ],
    "bodies": ["RESOURCE_EXHAUSTED SERVER: Received message larger than max"] * 6,
    "zipped_bodies": ["RESOURCE_EXHAUSTED Decompressed message larger than max"] * 6,
}


@asynccontextmanager
async def attacked(folder: Path) -> AsyncIterator[Suite]:
    """A deployment with API keys, and a real tokenizer in the router."""
    keys = folder / "keys"
    keys.write_text(f"{KEY} bystander\n{STRANGER_KEY} stranger\n")
    model = write_text_model(folder / "model")
    workers = f"sim:decode_step_s={STEP_S},context={CONTEXT_TOKENS}"
    settings = (
        ("router", "model", f"sim={model}"),
        ("router", "api_keys_file", str(keys)),
        ("prefill", "model", workers),
        ("decode", "model", workers),
    )
    async with suite(folder, settings=settings) as it:
        yield it


@pytest.mark.parametrize("name", STATUSES)
async def test_streams_go_on_during_an_attack(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with attacked(tmp_path) as it, bystander(it, KEY) as client, measured_loop_lag() as lag:
        quiet_s = time.monotonic()
        await asyncio.sleep(1)
        start_s = time.monotonic()
        found = await attack(it, name, STRANGER_KEY)
        end_s = time.monotonic()
        for line, expected in zip(found, STATUSES[name], strict=True):
            # A Route has the request in a field.
            assert line.startswith((expected, expected.replace(" chat.", " request.chat.", 1)))
        with capsys.disabled():
            client.report("\nquiet", quiet_s, start_s)
            client.report(name, start_s, end_s)
        stall_s = client.gaps_s(start_s, end_s)[-1] - lag.since(start_s)
        assert stall_s < STALL_MAX_S
