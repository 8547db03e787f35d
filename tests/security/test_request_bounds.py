"""A stranger's texts, messages and bodies are rejected at a bounded cost, and the streams of others go on."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path

import pytest

from tests.security.bystander import KEY, STRANGER_KEY, attack, attacked, bystander

# A stream of another client stops for a second at most. A machine that is ten times slower meets this.
STALL_MAX_S = 10.0
# On a busy machine, several rejections may fall into one moment. Then the next call is refused unread.
TOO_MANY = "RESOURCE_EXHAUSTED more than "
GROWTH_BYTES_MAX = 128 * 1024 * 1024
STATUSES = {
    "long_texts": [
        *["INVALID_ARGUMENT text: has "] * 6,
    ],
    "messages": [
        *["INVALID_ARGUMENT chat.messages: the request has more than "] * 2,
        "INVALID_ARGUMENT chat.messages: must hold at most 2048 messages",
    ],
    "stops": [
        "RESOURCE_EXHAUSTED SERVER: Received message larger than max",
        "INVALID_ARGUMENT sampling.stop[0]: must have at most 256 characters",
    ],
    "bodies": ["RESOURCE_EXHAUSTED SERVER: Received message larger than max"] * 6,
    "zipped_bodies": ["RESOURCE_EXHAUSTED Decompressed message larger than max"] * 6,
    "zipped_texts": ["INVALID_ARGUMENT text: has "] * 6,
    "fields": [
        *["INVALID_ARGUMENT chat.messages: must hold at most 2048 messages"] * 2,
        # The wrong text is too far from the beginning to be named.
        *["INVALID_ARGUMENT request: cannot be parsed"] * 4,
    ],
    "schemas": ["OK"] * 28,
}


@pytest.mark.timeout(600)
async def test_streams_go_on_during_every_attack(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with attacked(tmp_path) as it, bystander(it, KEY) as client:
        for name, statuses in STATUSES.items():
            quiet_s = time.monotonic()
            await asyncio.sleep(1)
            start_s = time.monotonic()
            found = await attack(it, name, STRANGER_KEY)
            end_s = time.monotonic()
            for line, expected in zip(found, statuses, strict=True):
                # A Route has the request in a field.
                in_route = expected.replace(" chat.", " request.chat.", 1)
                assert line.startswith((expected, in_route, TOO_MANY)), name
            assert not all(line.startswith(TOO_MANY) for line in found), name
            with capsys.disabled():
                client.report("\nquiet", quiet_s, start_s)
                client.report(name, start_s, end_s)
            assert client.gaps_s(start_s, end_s)[-1] < STALL_MAX_S, name


async def test_without_a_key_every_attack_is_rejected_before_its_body_arrives(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with attacked(tmp_path) as it, bystander(it, KEY) as client:
        router = it.child("router").process.pid
        before_bytes = peak_bytes(router)
        start_s = time.monotonic()
        for name, statuses in STATUSES.items():
            found = await attack(it, name)
            assert [line.split()[0] for line in found] == ["UNAUTHENTICATED"] * len(statuses)
        end_s = time.monotonic()
        with capsys.disabled():
            client.report("\nwithout a key", start_s, end_s)
        assert client.gaps_s(start_s, end_s)[-1] < STALL_MAX_S
        assert peak_bytes(router) - before_bytes < GROWTH_BYTES_MAX


def peak_bytes(process_id: int) -> int:
    """The most memory that a process has had."""
    status = Path(f"/proc/{process_id}/status").read_text(encoding="utf-8")
    return 1024 * int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0])
