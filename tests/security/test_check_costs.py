"""What a router checks in one tenant's requests delays no stream of another tenant by more than a second."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, Final

import pytest

from tests.ports import free_port
from tests.security.bystander import (
    KEY,
    ROOT,
    STRANGER_KEY,
    Bystander,
    attacked,
    bystander,
)

QUIET_S: Final = 3.0
ATTACK_S: Final = 6.0
ATTACK_WAIT_S: Final = 90.0
GAP_MAX_S: Final = 1.0
CONNECTIONS: Final = 6
_USER: Final = b'{"role":"user","content":'


def _lists(item: bytes, count: int, lists: int) -> bytes:
    """A chat of many messages with many parts each."""
    message = _USER + b"[" + b",".join([item] * count) + b"]}"
    return b'{"max_tokens":1,"messages":[' + b",".join([message] * lists) + b"]}"


def _calls(count: int, messages: int) -> bytes:
    call = b'{"function":{"name":"a"}}'
    message = b'{"role":"assistant","tool_calls":[' + b",".join([call] * count) + b"]}"
    return b'{"messages":[' + b",".join([message] * messages) + b"]}"


def _schema(schema: Any) -> bytes:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 1,
        "response_format": form,
    }
    return json.dumps(body, separators=(",", ":")).encode()


# Each body, its path, and the status of its answer.
BODIES: Final[dict[str, tuple[bytes, str, int]]] = {
    # Each took the event loop 2 s and more.
    "parts": (_lists(b'""', 256, 2_048), "/v1/chat/completions", 400),
    "calls": (_calls(128, 1_300), "/v1/chat/completions", 400),
    "blocks": (_lists(b'{"type":"text","text":""}', 256, 600), "/v1/messages", 400),
    "unknown": (b'{"prompt":"a","x":[' + b"[]," * 1_400_000 + b"1]}", "/v1/completions", 400),
    # Those that are just within the bounds.
    "many parts": (_lists(b'""', 230, 270), "/v1/chat/completions", 200),
    "tokens": (b'{"prompt":[' + b"1," * 500_000 + b"1]}", "/v1/completions", 400),
    "schema": (
        _schema({"enum": [{"a": number} for number in range(4_900)]}),
        "/v1/chat/completions",
        200,
    ),
    "small schema": (_schema({"allOf": [{}] * 480}), "/v1/chat/completions", 200),
}


@pytest.mark.parametrize("name", BODIES)
async def test_bodies_of_a_tenant_delay_no_stream_of_another(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    body, path, status = BODIES[name]
    listen = f"127.0.0.1:{free_port()}"
    async with (
        attacked(tmp_path, ("router", "http_listen", listen)) as it,
        bystander(it, KEY) as client,
    ):
        quiet_s = time.monotonic()
        await asyncio.sleep(QUIET_S)
        start_s = time.monotonic()
        found = await _post(listen, path, body)
        end_s = time.monotonic()
        with capsys.disabled():
            client.report("\nquiet", quiet_s, start_s)
            client.report(f"{name}, {found.total()} bodies", start_s, end_s)
        assert set(found) == {status}
        _check(client, (quiet_s, start_s), (start_s, end_s))


def _check(client: Bystander, quiet: tuple[float, float], attack: tuple[float, float]) -> None:
    """The longest gap and the 99th percentile are at most twice those of a quiet time, or a second."""
    before_s, during_s = client.gaps_s(*quiet), client.gaps_s(*attack)
    for share in (0.99, 1.0):
        bound_s = max(GAP_MAX_S, 2 * before_s[int(share * (len(before_s) - 1))])
        assert during_s[int(share * (len(during_s) - 1))] <= bound_s


async def _post(address: str, path: str, body: bytes) -> Counter[int]:
    """Posts the body again and again on several connections. Returns the number of answers by status."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.security.http_attacker"),
        *(address, path, STRANGER_KEY, str(ATTACK_S), str(CONNECTIONS)),
        cwd=ROOT,
        env={"PYTHONPATH": ":".join(path for path in sys.path if path)},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(ATTACK_WAIT_S):
        output, _ = await process.communicate(body)
    assert process.returncode == 0
    return Counter({int(status): count for status, count in json.loads(output).items()})
