"""Rejected HTTP requests count for their caller by their bytes and by the time of their checks."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest.mock import Mock

import pytest

from headrace_common.callers import bounds as bounds_module
from headrace_common.callers.bounds import CallerBounds, CallerLimits
from headrace_frontend.openai.app import OpenAiApp
from headrace_frontend.openai.metrics_page import MetricsPage
from headrace_frontend.openai.parts import OpenAiParts
from headrace_frontend.request.size import RequestSizeCheck
from headrace_frontend.tenants import Tenants

_CONTEXT = 1_000_000
_LARGE = 8 * 1024 * 1024


def _app(callers: CallerBounds) -> OpenAiApp:
    parts = OpenAiParts(
        codecs={},
        parsers={},
        models=Mock(),
        tenants=Tenants(None),
        runner=Mock(),
        preparer=Mock(),
        size=RequestSizeCheck(lambda: {"sim": _CONTEXT}, 16),
        count_failures=contextlib.nullcontext,
        callers=callers,
    )
    metrics = MetricsPage(Tenants(None), str)
    return OpenAiApp(parts, metrics, deadline_s=1.0, body_bytes_max=2 * _LARGE)


async def _status(app: OpenAiApp, body: bytes) -> int:
    """The status of a completion with this body."""
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": body}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json")]
    scope = {"method": "POST", "path": "/v1/completions", "headers": headers}
    await app(scope, receive, send)
    status: int = sent[0]["status"]
    return status


@pytest.mark.parametrize("cause", ["few and small", "large", "slow"])
async def test_a_costly_wrong_body_exhausts_what_small_ones_do_not(
    monkeypatch: pytest.MonkeyPatch, cause: str
) -> None:
    monkeypatch.setattr(bounds_module, "_REFUSAL_WAIT_S", 0.0)
    ticks = iter(range(1_000))
    callers = CallerBounds(
        CallerLimits(4, 10.0, 60.0),
        clock=lambda: 0.0,
        cpu_clock=lambda: float(next(ticks)) if cause == "slow" else 0.0,
    )
    app = _app(callers)
    assert await _status(app, b"[" * (_LARGE if cause == "large" else 10)) == 400
    assert await _status(app, b"[") == (400 if cause == "few and small" else 429)
