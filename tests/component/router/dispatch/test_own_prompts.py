"""Enqueue: the prompts of decode workers' own requests."""

from __future__ import annotations

from typing import Any

import grpc.aio
import pytest
from google.protobuf.duration_pb2 import Duration

from headrace.inference.v1 import adapter_pb2
from headrace.prefill.v1 import prefill_pb2, prefill_pb2_grpc
from headrace_common.access.roles import Caller, Role, _current
from headrace_common.errors import (
    DuplicateTransfer,
    HeadraceError,
    InvalidRequest,
    PermissionDenied,
    QueueFull,
    WorkerGone,
)
from headrace_common.rpc.channel import open_channel
from headrace_common.rpc.status import error_from_rpc
from headrace_router.dispatch import own_prompts
from tests.kit.router import Rig
from tests.kit.workers import FakeDecode, fail, hand_over, hang, stall
from tests.waiting import until

PROMPT = list(b"a prompt of a decode worker")


def request_of(worker: FakeDecode, **fields: Any) -> prefill_pb2.EnqueueRequest:
    values = {
        "transfer_id": "own-1",
        "request_id": "mine",
        "worker_id": worker.member.worker_id,
        "incarnation": worker.member.incarnation,
        "token_ids": PROMPT,
        "start_token": 3,
        "traceparent": f"00-{7:032x}-{9:016x}-01",
    }
    return prefill_pb2.EnqueueRequest(**{**values, **fields})


async def enqueue(rig: Rig, request: prefill_pb2.EnqueueRequest) -> prefill_pb2.EnqueueResponse:
    """Raises HeadraceError."""
    async with open_channel(rig.internal_endpoint) as channel:
        stub = prefill_pb2_grpc.PrefillQueueServiceStub(channel)
        try:
            return await stub.Enqueue(request, timeout=5)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error


_NO_CONTEXT: Any = None


async def error_of(rig: Rig, request: prefill_pb2.EnqueueRequest) -> HeadraceError:
    with pytest.raises(HeadraceError) as raised:
        await enqueue(rig, request)
    return raised.value


async def test_a_prompt_is_prefilled_without_its_last_token_and_traced(rig: Rig) -> None:
    worker = await rig.add_decode(hang)
    prefill = await rig.add_prefill(hand_over)
    response = await enqueue(rig, request_of(worker, cache_salt="5a17"))
    assert response.worker_id == "p0"
    (task,) = prefill.tasks
    assert list(task.token_ids) == PROMPT[:-1]
    assert (task.start_token, task.cache_salt) == (3, "5a17")
    assert task.decode_endpoint == worker.member.endpoint
    assert (await rig.trace_of("mine")).trace_id == f"{7:032x}"
    assert isinstance(await error_of(rig, request_of(worker)), DuplicateTransfer)
    assert not response.HasField("steps")


async def test_the_steps_of_queue_and_prefill_are_reported_when_asked(rig: Rig) -> None:
    worker = await rig.add_decode(hang)
    await rig.add_prefill(hand_over)
    steps = (await enqueue(rig, request_of(worker, include_latency=True))).steps
    assert 0 < steps.queued_us <= steps.pulled_us <= steps.sent_us


async def test_wrong_fields_are_named_before_any_work(rig: Rig) -> None:
    worker = await rig.add_decode(hang)
    prefill = await rig.add_prefill(hand_over)
    context = worker.member.max_model_len
    for field, value in (
        ("transfer_id", ""),
        ("transfer_id", "x" * 129),
        ("request_id", "x" * 129),
        ("traceparent", "x" * 65),
        ("token_ids", [1]),
        ("token_ids", [1] * (context + 1)),
        ("token_ids", [1, 2**31]),
        ("start_token", len(PROMPT) - 1),
        ("cache_salt", "x" * 1_000),
        ("adapter", adapter_pb2.Adapter(name="poet", digest="aa")),
    ):
        if field == "adapter":
            worker.change_member(adapters=[adapter_pb2.Adapter(name="poet", digest="bb")])
            rig.refresh()
        values = {"cache_salt": "5a17", field: value}
        error = await error_of(rig, request_of(worker, **values))
        assert isinstance(error, InvalidRequest), (field, error)
        assert list(error.violations) == [field]
    stale = request_of(worker, incarnation="0" * 16)
    assert isinstance(await error_of(rig, stale), WorkerGone)
    assert not prefill.tasks


async def test_errors_reach_the_decode_worker(rig: Rig) -> None:
    worker = await rig.add_decode(hang)
    assert isinstance(await error_of(rig, request_of(worker)), WorkerGone)
    await rig.add_prefill(fail("TRANSFER_FAILED"))
    assert (
        await error_of(rig, request_of(worker, transfer_id="own-2"))
    ).reason == "TRANSFER_FAILED"
    rig.router.runner.drain()
    assert (await error_of(rig, request_of(worker, transfer_id="own-3"))).reason == "DRAINING"


async def test_a_worker_without_a_reservation_may_queue_no_further_prompts_for_a_while(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, other = await rig.add_decodes(hang, hang)
    prefill = await rig.add_prefill(fail("NOT_FOUND"))
    assert (await error_of(rig, request_of(worker))).reason == "NOT_FOUND"
    error = await error_of(rig, request_of(worker, transfer_id="own-2"))
    assert isinstance(error, QueueFull)
    assert error.retry_after_s is not None
    assert 0 < error.retry_after_s <= 1
    # The pause is over, and that of another worker has not begun.
    monkeypatch.setattr(own_prompts, "_UNRESERVED_PAUSE_S", 0.0)
    assert (await error_of(rig, request_of(other, transfer_id="own-3"))).reason == "NOT_FOUND"
    assert (await error_of(rig, request_of(other, transfer_id="own-4"))).reason == "NOT_FOUND"
    assert [task.transfer_id for task in prefill.tasks] == ["own-1", "own-3", "own-4"]


async def test_a_slow_queue_is_left_by_the_policy(rig: Rig) -> None:
    worker = await rig.add_decode(hang)
    await rig.add_prefill(stall)
    rig.policy.max_queue_wait.CopyFrom(Duration(nanos=1))
    rig.router.queue.wait_s = lambda *_: 3.0  # type: ignore[method-assign]
    error = await error_of(rig, request_of(worker))
    assert isinstance(error, QueueFull)
    assert "max_queue_wait" in error.detail


async def test_a_cancelled_call_cancels_the_task(rig: Rig) -> None:
    worker = await rig.add_decode(hang)
    prefill = await rig.add_prefill(stall)
    async with open_channel(rig.internal_endpoint) as channel:
        stub = prefill_pb2_grpc.PrefillQueueServiceStub(channel)
        call = stub.Enqueue(request_of(worker), timeout=5)
        await until(lambda: len(prefill.tasks) == 1)
        call.cancel()
        await until(lambda: prefill.cancels == ["own-1"])


async def test_a_worker_queues_prompts_for_itself_only(rig: Rig) -> None:
    worker = await rig.add_decode(hang)
    prefill = await rig.add_prefill(hand_over)
    named = Caller(frozenset({Role.DECODE}), "d9")
    token = _current.set(named)
    try:
        with pytest.raises(PermissionDenied):
            await rig.router.services.queue.Enqueue(request_of(worker), _NO_CONTEXT)
    finally:
        _current.reset(token)
    assert not prefill.tasks
