"""Commands go on without a member that does not answer, and with events of another release."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import AsyncMock

import pytest

from headrace.incident.v1 import incident_pb2
from headrace.inference.v1 import load_pb2
from headrace.registry.v1 import registry_pb2
from headrace_cli import usage
from headrace_cli.commands.incident import _note
from headrace_cli.members import Row
from headrace_common.errors import HeadraceError, WorkerGone


@asynccontextmanager
async def opened(endpoint: str) -> AsyncIterator[Any]:
    if endpoint == "silent":
        raise WorkerGone("no answer")
    yield AsyncMock(usages=AsyncMock(return_value=[load_pb2.HourlyUsage(tenant="a")]))


async def test_usage_names_a_router_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(usage, "open_router_internally", opened)
    role = registry_pb2.Member.ROLE_ROUTER
    rows = [Row(registry_pb2.Member(worker_id=n, role=role, endpoint=n)) for n in ("silent", "r1")]
    assert [line.tenant for line in await usage._read(rows, 0)] == ["a"]
    assert "silent is left out: no answer" in capsys.readouterr().err
    with pytest.raises(HeadraceError, match="no answer"):
        await usage._read(rows[:1], 0)


@pytest.mark.parametrize("value", ["", "7", "{}", '{"level": "ERROR"}'])
@pytest.mark.parametrize("kind", ["Alarm", "LogLine", "TaskDone"])
def test_an_event_of_another_shape_has_no_note(kind: str, value: str) -> None:
    assert _note(incident_pb2.Event(kind=kind, value=value)) == ""
