"""Decode workers with wrong clocks, and decode workers that refuse tickets."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from headrace.decode.v1 import decode_pb2
from headrace_common.errors import Unauthenticated
from headrace_common.rpc.tickets import check_ticket
from headrace_common.telemetry import schema
from headrace_kv.layout.layout import WorkerRef
from headrace_router.workers import connection
from tests.collector import collecting
from tests.component.router.fakes import TICKET_KEY, FakeDecode, Rig, reject, reply, text_of
from tests.waiting import until


def strict(text: str) -> Any:
    """A script that checks the ticket by the worker's own clock, as a decode worker does."""

    async def run(worker: FakeDecode, request: decode_pb2.GenerateRequest) -> AsyncIterator[Any]:
        worker_id = worker.member.worker_id
        check_ticket(TICKET_KEY, request, worker_id, clock=lambda *_: worker.unix_ns())
        async for event in reply(text)(worker, request):
            yield event

    return run


def ref_of(worker: FakeDecode) -> WorkerRef:
    return WorkerRef(worker.member.worker_id, worker.member.incarnation)


async def add_shifted(rig: Rig, offset_s: float) -> FakeDecode:
    """A decode worker with this clock offset, once the router knows it."""
    worker = await rig.add_decode(strict("ok"))
    await shift(rig, worker, offset_s)
    return worker


async def shift(rig: Rig, worker: FakeDecode, offset_s: float) -> None:
    worker.clock_offset_s = offset_s
    workers, name = rig.router.workers, worker.member.worker_id
    await until(lambda: abs(workers.clock_offsets_s().get(name, 1e9) - offset_s) < 1)


@pytest.mark.parametrize("offset_s", [-3600.0, -11.0, 11.0, 3600.0])
async def test_a_worker_accepts_the_tickets_although_its_clock_is_wrong(
    rig: Rig, caplog: pytest.LogCaptureFixture, offset_s: float
) -> None:
    worker = await add_shifted(rig, offset_s)
    assert text_of(await rig.ask()) == "ok"
    assert len(worker.requests) == 1, "the first attempt was accepted"
    (warning,) = (r for r in caplog.records if "the clock of decode worker" in r.getMessage())
    found = re.search(r"is ([0-9.]+) s (ahead of|behind) this router's", warning.getMessage())
    assert found, warning.getMessage()
    assert warning.levelno == logging.WARNING
    sign = 1 if found[2] == "ahead of" else -1
    assert sign * float(found[1]) == pytest.approx(offset_s, abs=5)


async def test_a_clock_that_is_set_costs_one_attempt(rig: Rig) -> None:
    worker = await add_shifted(rig, 0.0)
    worker.reports.clear()
    worker.clock_offset_s = 3600.0
    try:
        responses = await rig.ask()
    finally:
        worker.reports.set()
    assert text_of(responses) == "ok"
    assert responses[-1].timing.attempts == 2
    assert not rig.router.workers.table("sim").refuses_tickets.any()


async def test_a_worker_that_refuses_tickets_is_not_chosen_and_the_warning_names_its_clock(
    caplog: pytest.LogCaptureFixture,
) -> None:
    not_signed = Unauthenticated("it was not signed", metadata={"ticket": "signature"})
    async with collecting() as (collector, endpoint), AsyncExitStack() as stack:
        rig = await Rig(otlp_endpoint=endpoint).start()
        stack.push_async_callback(rig.close)
        refusing, other = await rig.add_decodes(reject(not_signed), reply("ok"))
        await shift(rig, refusing, 30.0)
        for _ in range(4):
            assert text_of(await rig.ask()) == "ok"
        assert (len(refusing.requests), len(other.requests)) == (1, 4)
        refused = [r.getMessage() for r in caplog.records if "refused this" in r.getMessage()]
        assert len(refused) == 1
        assert f"{ref_of(refusing)} refused this router's ticket (signature)" in refused[0]
        found = re.search(r"Its clock is ([0-9.]+) s ahead", refused[0])
        assert found, refused[0]
        assert float(found[1]) == pytest.approx(30, abs=5)
        rig.router.metrics.sample()
        await asyncio.to_thread(rig.telemetry.metrics.force_flush)
        name = {schema.ATTRIBUTE_WORKER_ID: refusing.member.worker_id}
        counted = name | {schema.ATTRIBUTE_TICKET_PART: "signature"}
        assert collector.value(schema.METRIC_TICKET_REFUSALS, **counted) == 1
        offset_ms = collector.value(schema.METRIC_CLOCK_OFFSET_MS, **name)
        assert offset_ms == pytest.approx(30_000, abs=2_000)


async def test_a_worker_that_refused_a_ticket_is_asked_again_after_a_pause(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_REFUSAL_PAUSE_S", 0.2)
    worker = await add_shifted(rig, 0.0)
    rig.router.workers.ticket_refused(ref_of(worker), "signature", 0)
    refuses = rig.router.workers.table("sim").refuses_tickets
    assert refuses.any()
    await until(lambda: not refuses.any())


async def test_a_worker_that_does_not_send_its_time_gets_tickets_by_the_router_s_clock(
    rig: Rig,
) -> None:
    worker = await rig.add_decode(strict("ok"))
    worker.clock_offset_s = None
    worker.running_requests = 1
    await rig.loads_known()
    assert text_of(await rig.ask()) == "ok"
