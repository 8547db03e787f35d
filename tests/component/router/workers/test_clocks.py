"""Decode workers with wrong clocks, and the direct tickets for them."""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest

from headrace.decode.v1 import decode_pb2, decode_pb2_grpc
from headrace.inference.v1 import inference_pb2
from headrace_common.errors import Unauthenticated
from headrace_common.rpc.status import error_from_rpc
from headrace_common.tickets.direct import check_ticket
from headrace_common.tickets.direct_request import decode_request_of
from headrace_kv.layout.layout import WorkerRef
from headrace_router.workers import connection
from tests.component.router.fakes import FakeDecode, Rig, reply, text_of, with_settings
from tests.waiting import until

LOOK_ASIDE = with_settings(look_aside=True)


def strict(rig: Rig, text: str) -> Any:
    """A script that checks the ticket by the worker's own clock, as a decode worker does."""

    async def run(worker: FakeDecode, request: decode_pb2.GenerateRequest) -> AsyncIterator[Any]:
        if request.ticket:
            name, clock = worker.member.worker_id, worker.unix_ns
            check_ticket(rig.router_key.known.find, request, name, clock=lambda *_: clock())
        async for event in reply(text)(worker, request):
            yield event

    return run


async def add_shifted(rig: Rig, offset_s: float) -> FakeDecode:
    """A decode worker with this clock offset, once the router knows it."""
    worker = await rig.add_decode(strict(rig, "ok"))
    await shift(rig, worker, offset_s)
    return worker


async def shift(rig: Rig, worker: FakeDecode, offset_s: float) -> None:
    worker.clock_offset_s = offset_s
    workers, name = rig.router.workers, worker.member.worker_id
    await until(lambda: abs(workers.clock_offsets_s().get(name, 1e9) - offset_s) < 1)


async def granted(rig: Rig) -> inference_pb2.DirectRequest | None:
    """A direct request, None when the router grants none."""
    request = inference_pb2.GenerateRequest(text="a prompt")
    routed = await rig.stub.Route(inference_pb2.RouteRequest(request=request), timeout=5)
    return routed.direct if routed.HasField("direct") else None


async def stream(direct: inference_pb2.DirectRequest) -> None:
    """Streams a direct request. Raises the worker's error."""
    async with grpc.aio.insecure_channel(direct.endpoint) as channel:
        stub: Any = decode_pb2_grpc.DecodeServiceStub(channel)
        try:
            async for _ in stub.Generate(decode_request_of(direct), timeout=5):
                pass
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error


@LOOK_ASIDE
@pytest.mark.parametrize("offset_s", [-3600.0, -11.0, 11.0, 3600.0])
async def test_a_worker_accepts_the_tickets_although_its_clock_is_wrong(
    rig: Rig,
    caplog: pytest.LogCaptureFixture,
    offset_s: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "_CLOCK_SET_PAUSE_S", 0.1)
    worker = await add_shifted(rig, offset_s)
    ref = WorkerRef(worker.member.worker_id, worker.member.incarnation)
    await until(lambda: rig.router.workers.accepts_tickets(ref))
    direct = await granted(rig)
    assert direct is not None
    await stream(direct)
    (warning,) = (r for r in caplog.records if "Tickets allow for it" in r.getMessage())
    found = re.search(r"is ([0-9.]+) s (ahead of|behind) this router's", warning.getMessage())
    assert found, warning.getMessage()
    assert warning.levelno == logging.WARNING
    sign = 1 if found[2] == "ahead of" else -1
    assert sign * float(found[1]) == pytest.approx(offset_s, abs=5)


@LOOK_ASIDE
async def test_a_clock_that_is_set_forward_stops_the_grants_and_a_warning_names_the_offset(
    rig: Rig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_CLOCK_SET_PAUSE_S", 60.0)
    worker = await add_shifted(rig, 0.0)
    before = await granted(rig)
    assert before is not None
    await shift(rig, worker, 3600.0)
    with pytest.raises(Unauthenticated, match="expired"):
        await stream(before)
    assert await granted(rig) is None
    assert text_of(await rig.ask()) == "ok", "requests go through the router"
    (warning,) = (r.getMessage() for r in caplog.records if "set forward" in r.getMessage())
    found = re.search(r"set forward by ([0-9.]+) s, .* ([0-9.]+) s ahead", warning)
    assert found, warning
    assert [float(one) for one in found.groups()] == pytest.approx([3600, 3600], abs=5)


@LOOK_ASIDE
async def test_grants_go_on_after_a_pause_by_the_new_clock(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_CLOCK_SET_PAUSE_S", 0.2)
    worker = await add_shifted(rig, 0.0)
    await shift(rig, worker, 30.0)
    direct: inference_pb2.DirectRequest | None = None
    while direct is None:
        direct = await granted(rig)
    await stream(direct)
