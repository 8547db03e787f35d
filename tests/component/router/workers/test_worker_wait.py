"""Requests that arrive before any decode worker is known, or after the last one is lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest

from headrace.inference.v1 import inference_pb2
from headrace_common.errors import HeadraceError, InvalidRequest, NoDecodeWorker
from headrace_common.rpc.status import error_from_rpc
from tests.component.router.fakes import CONTEXT_TOKENS, Rig, die_after, reply, text_of
from tests.waiting import until


@pytest.fixture
async def patient() -> AsyncIterator[Rig]:
    """A router that lets requests wait longer than any test takes."""
    rig = await Rig(worker_wait_s=20.0).start()
    yield rig
    await rig.close()


async def _error(rig: Rig, text: str = "a prompt") -> tuple[HeadraceError, float]:
    """The error of a request, and how long it took in seconds."""
    started_s = time.monotonic()
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await rig.ask(text)
    return error_from_rpc(raised.value), time.monotonic() - started_s


async def test_a_request_waits_for_the_first_worker(patient: Rig) -> None:
    asking = [asyncio.create_task(patient.ask()) for _ in range(3)]
    await asyncio.sleep(0.3)
    assert not any(one.done() for one in asking)
    await patient.add_decode(reply("ok"))
    assert [text_of(await one) for one in asking] == ["ok"] * 3


async def test_a_request_waits_for_workers_that_left_the_registry(patient: Rig) -> None:
    await patient.add_decode(reply("ok"))
    assert text_of(await patient.ask()) == "ok"
    patient.router.update([])
    asking = asyncio.create_task(patient.ask())
    await asyncio.sleep(0.3)
    assert not asking.done()
    patient.refresh()
    assert text_of(await asking) == "ok"


async def test_a_request_waits_for_workers_that_left_between_check_and_placement(
    patient: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await patient.add_decode(reply("ok"))
    inference = patient.router.inference
    prepare = inference._preparer.prepare

    async def prepare_and_lose(*arguments: Any) -> Any:
        prepared = await prepare(*arguments)
        patient.router.update([])
        asyncio.get_running_loop().call_later(0.3, patient.refresh)
        return prepared

    monkeypatch.setattr(inference._preparer, "prepare", prepare_and_lose)
    assert text_of(await patient.ask()) == "ok"


async def test_a_request_without_tokens_waits_for_the_next_incarnation(patient: Rig) -> None:
    dying = await patient.add_decode(die_after(""))
    asking = asyncio.create_task(patient.ask())
    await until(lambda: bool(dying.background))
    await asyncio.gather(*dying.background)
    await asyncio.sleep(0.5)
    assert not asking.done()
    patient.decodes.remove(dying)
    await patient.add_decode(reply("ok"))
    responses = await asking
    assert text_of(responses) == "ok"
    assert responses[-1].timing.attempts == 2


async def test_after_the_wait_is_over_requests_fail_at_once() -> None:
    rig = await Rig(worker_wait_s=2.0).start()
    try:
        error, waited_s = await _error(rig)
        assert isinstance(error, NoDecodeWorker)
        assert waited_s < 4
        error, waited_s = await _error(rig)
        assert isinstance(error, NoDecodeWorker)
        assert waited_s < 1.9
    finally:
        await rig.close()


@pytest.mark.usefixtures("early_router_deadline")
async def test_no_request_waits_past_its_deadline(patient: Rig) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await patient.ask(timeout_s=6.0)
    assert isinstance(error_from_rpc(raised.value), NoDecodeWorker)


async def test_the_limits_of_the_late_worker_apply(patient: Rig) -> None:
    asking = asyncio.create_task(_error(patient, "x" * 2 * CONTEXT_TOKENS))
    await asyncio.sleep(0.2)
    await patient.add_decode(reply("ok"))
    error, _ = await asking
    assert isinstance(error, InvalidRequest)


async def test_a_route_waits_but_its_explanation_does_not(patient: Rig) -> None:
    def route(explain: bool) -> grpc.aio.UnaryUnaryCall[object, inference_pb2.RouteResponse]:
        request = inference_pb2.GenerateRequest(text="a prompt")
        call: grpc.aio.UnaryUnaryCall[object, inference_pb2.RouteResponse] = patient.stub.Route(
            inference_pb2.RouteRequest(request=request, explain=explain), timeout=10
        )
        return call

    with pytest.raises(grpc.aio.AioRpcError) as raised:
        async with asyncio.timeout(2):
            await route(explain=True)
    assert isinstance(error_from_rpc(raised.value), NoDecodeWorker)
    routing = route(explain=False)
    worker = await patient.add_decode(reply("ok"))
    assert (await routing).worker_id == worker.member.worker_id
