"""The bounds on one HTTP caller: rejected requests, turns, bodies, and removed keys."""

from __future__ import annotations

import asyncio
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest

from headrace_common import reloading
from headrace_common.callers.bounds import CallerBounds
from headrace_common.errors import InvalidRequest
from headrace_common.http import exchange
from headrace_frontend.openai.app import MetricsPage
from headrace_frontend.openai.errors import serve
from headrace_frontend.tenants import load_tenants
from tests.kit.openai_app import LocalApp, Request

_LARGE = 8 * 1024 * 1024


def _app(**parts: Any) -> LocalApp:
    callers = CallerBounds(4, check_s=0.05)
    parts = {"callers": callers, "context": 1_000_000, "body_bytes_max": 2 * _LARGE, **parts}
    return LocalApp(**parts)


async def test_a_body_is_parsed_in_the_turn_of_its_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    callers = CallerBounds(4, check_s=0.05)
    turn = asyncio.Event()
    monkeypatch.setattr(callers, "wait_turn", turn.wait)
    request = Request(b"[")
    asking = asyncio.create_task(_app(callers=callers).status(request))
    for _ in range(20):
        await asyncio.sleep(0)
    assert request.received == 1
    assert not request.sent
    turn.set()
    assert await asyncio.wait_for(asking, 5) == 400


async def test_a_refused_request_is_freed_without_a_garbage_collection() -> None:
    class Body:
        """What the frames of the error refer to."""

    made: list[weakref.ref[Body]] = []

    async def refuse() -> None:
        body = Body()
        made.append(weakref.ref(body))
        raise InvalidRequest({"body": "has too many values"})

    gc.disable()
    try:
        await serve(Request().exchange, refuse())
        assert made[0]() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("request_", "status", "received"),
    [
        (Request(b"x" * 1024 * 1024, endless=True), 413, 17),
        (Request(b"x", content_length=str(2 * _LARGE + 1)), 413, 0),
        (Request(b"x", content_encoding="gzip"), 415, 0),
        (Request(b"x", content_type="text/plain"), 415, 0),
    ],
    ids=["endless", "long", "compressed", "no JSON"],
)
async def test_a_body_beyond_the_bounds_is_not_received(
    request_: Request, status: int, received: int
) -> None:
    assert await asyncio.wait_for(_app().status(request_), 20) == status
    assert request_.received == received


async def test_a_body_that_does_not_arrive_ends_its_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exchange, "BODY_WAIT_S", 0.05)
    assert await asyncio.wait_for(_app().status(Request()), 5) == 408


@pytest.mark.parametrize(("part_bytes", "status"), [(2**20, 413), (1_000, 408)])
async def test_a_large_body_has_more_time(part_bytes: int, status: int) -> None:
    """A part comes each 3 s, so 30 s are over before the body is too large."""
    request = Request(b"x" * part_bytes, endless=True, every_s=3)
    started_s = asyncio.get_running_loop().time()
    assert await _app().status(request) == status
    assert asyncio.get_running_loop().time() - started_s >= 30


async def test_a_request_ends_after_its_key_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reloading, "CHECK_INTERVAL_S", 0.0)
    keys = tmp_path / "keys"
    keys.write_text("key-of-a-tenant tenant\nanother-key other\n")
    app = _app(tenants=load_tenants(str(keys)))
    request = Request(authorization="Bearer key-of-a-tenant")
    asking = asyncio.create_task(app.status(request))
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
    app = _app(metrics=MetricsPage(readers, str, listen))
    assert await app.status(Request(path="/metrics", method="GET")) == status
