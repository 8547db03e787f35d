"""The bounds on one HTTP caller: rejected requests, turns, bodies, and removed keys."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from headrace_common import reloading
from headrace_common.callers.bounds import CallerBounds
from headrace_frontend.conversations import ConversationStore
from headrace_frontend.openai import exchange
from headrace_frontend.openai.app import MetricsPage, OpenAiApp
from headrace_frontend.openai.image_fetch import ImageFetcher
from headrace_frontend.openai.intake import OpenAiParts
from headrace_frontend.request.preparation import RequestPreparer
from headrace_frontend.request.size import RequestSizeCheck
from headrace_frontend.tenants import Tenants, load_tenants

_CONTEXT = 1_000_000
_PARTS_MAX = 32
_LARGE = 8 * 1024 * 1024


def _app(
    callers: CallerBounds, tenants: Tenants | None = None, metrics: MetricsPage | None = None
) -> OpenAiApp:
    parts = OpenAiParts(
        codecs={},
        parsers={},
        models=Mock(),
        tenants=tenants or Tenants(None),
        runner=Mock(),
        preparer=RequestPreparer({}, Mock(), str),
        size=RequestSizeCheck(lambda: {"sim": _CONTEXT}),
        count_failures=contextlib.nullcontext,
        callers=callers,
        conversations=ConversationStore(0, 1.0),
        keep=Mock(),
        images=ImageFetcher(()),
    )
    page = metrics or MetricsPage(Tenants(None), str, "")
    return OpenAiApp(parts, page, deadline_s=1.0, body_bytes_max=2 * _LARGE)


class _Request:
    """A request with a body in parts. Without an end, the first part is repeated."""

    def __init__(
        self,
        *parts: bytes,
        path: str = "/v1/completions",
        method: str = "POST",
        endless: bool = False,
        **headers: str,
    ) -> None:
        named = {"content_type": "application/json", **headers}
        self._parts = list(parts)
        self._endless = endless
        self.scope = {
            "method": method,
            "path": path,
            "headers": [
                (name.replace("_", "-").encode(), value.encode()) for name, value in named.items()
            ],
        }
        self.received = 0
        self.sent: list[Any] = []

    async def receive(self) -> Any:
        if not self._parts or self.received == _PARTS_MAX:
            await asyncio.Event().wait()
        self.received += 1
        part = self._parts[0] if self._endless else self._parts.pop(0)
        return {"type": "http.request", "body": part, "more_body": self._endless}

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    async def status(self, app: OpenAiApp) -> int:
        await app(self.scope, self.receive, self.send)
        status: int = self.sent[0]["status"]
        return status


async def _status(app: OpenAiApp, body: bytes) -> int:
    """The status of a completion with this body."""
    return await _Request(body).status(app)


def _bounds() -> CallerBounds:
    return CallerBounds(4, check_s=0.05)


async def test_a_body_is_parsed_in_the_turn_of_its_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    callers = _bounds()
    turn = asyncio.Event()
    monkeypatch.setattr(callers, "wait_turn", turn.wait)
    request = _Request(b"[")
    asking = asyncio.create_task(request.status(_app(callers)))
    for _ in range(20):
        await asyncio.sleep(0)
    assert request.received == 1
    assert not request.sent
    turn.set()
    assert await asyncio.wait_for(asking, 5) == 400


@pytest.mark.parametrize(
    ("request_", "status", "received"),
    [
        (_Request(b"x" * 1024 * 1024, endless=True), 413, 17),
        (_Request(b"x", content_length=str(2 * _LARGE + 1)), 413, 0),
        (_Request(b"x", content_encoding="gzip"), 415, 0),
        (_Request(b"x", content_type="text/plain"), 415, 0),
    ],
    ids=["endless", "long", "compressed", "no JSON"],
)
async def test_a_body_beyond_the_bounds_is_not_received(
    request_: _Request, status: int, received: int
) -> None:
    assert await asyncio.wait_for(request_.status(_app(_bounds())), 20) == status
    assert request_.received == received


async def test_a_body_that_does_not_arrive_ends_its_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exchange, "BODY_WAIT_S", 0.05)
    assert await asyncio.wait_for(_Request().status(_app(_bounds())), 5) == 408


@pytest.mark.parametrize(("part_bytes", "status"), [(2**20, 413), (1_000, 408)])
async def test_a_large_body_has_more_time(part_bytes: int, status: int) -> None:
    """A part comes each 3 s, so 30 s are over before the body is too large."""
    request = _Request(b"x" * part_bytes, endless=True)
    received_at_once = request.receive

    async def receive() -> Any:
        await asyncio.sleep(3)
        return await received_at_once()

    request.receive = receive  # type: ignore[method-assign]
    started_s = asyncio.get_running_loop().time()
    assert await request.status(_app(_bounds())) == status
    assert asyncio.get_running_loop().time() - started_s >= 30


async def test_a_request_ends_after_its_key_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reloading, "CHECK_INTERVAL_S", 0.0)
    keys = tmp_path / "keys"
    keys.write_text("key-of-a-tenant tenant\nanother-key other\n")
    app = _app(_bounds(), load_tenants(str(keys)))
    request = _Request(authorization="Bearer key-of-a-tenant")
    asking = asyncio.create_task(request.status(app))
    await asyncio.sleep(0)
    assert not asking.done()
    keys.write_text("another-key other\n")
    assert await asyncio.wait_for(asking, 5) == 401


@pytest.mark.parametrize(
    ("listen", "keys", "status"),
    [
        ("127.0.0.1:7056", "", 200),
        ("0.0.0.0:7056", "", 403),
        ("127.0.0.1:7056", "key-of-a-reader reader", 401),
    ],
)
async def test_metrics_need_a_key_where_there_are_keys_and_beyond_loopback(
    tmp_path: Path, listen: str, keys: str, status: int
) -> None:
    path = tmp_path / "keys"
    path.write_text(keys)
    readers = load_tenants(str(path) if keys else "", "metrics_keys_file")
    app = _app(_bounds(), metrics=MetricsPage(readers, str, listen))
    assert await _Request(path="/metrics", method="GET").status(app) == status
