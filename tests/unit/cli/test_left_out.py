"""Commands go on without a member that does not answer, and with events of another release."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from headrace.incident.v1 import incident_pb2
from headrace.inference.v1 import load_pb2
from headrace.registry.v1 import registry_pb2
from headrace_cli import usage
from headrace_cli.commands.incident import _note
from headrace_cli.members import Row
from headrace_common.errors import HeadraceError, WorkerGone


def router(name: str) -> Row:
    role = registry_pb2.Member.ROLE_ROUTER
    return Row(registry_pb2.Member(worker_id=name, role=role, endpoint=name))


@asynccontextmanager
async def opened(endpoint: str) -> AsyncIterator[Any]:
    class Client:
        async def usages(self, since_unix_ns: int) -> list[load_pb2.HourlyUsage]:
            if endpoint == "silent":
                raise WorkerGone("no answer")
            return [load_pb2.HourlyUsage(tenant="a")]

    yield Client()


async def test_usage_names_a_router_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(usage, "open_router_internally", opened)
    found = await usage._read([router("silent"), router("r1")], 0)
    assert [line.tenant for line in found] == ["a"]
    assert "silent is left out: no answer" in capsys.readouterr().err
    with pytest.raises(HeadraceError, match="no answer"):
        await usage._read([router("silent")], 0)


@pytest.mark.parametrize("value", ["", "7", "{}", '{"level": "ERROR"}'])
@pytest.mark.parametrize("kind", ["Alarm", "LogLine", "TaskDone"])
def test_an_event_of_another_shape_has_no_note(kind: str, value: str) -> None:
    assert _note(incident_pb2.Event(kind=kind, value=value)) == ""
