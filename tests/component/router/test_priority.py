"""Classes of requests over real gRPC and HTTP: grants, the order of prompts, and tickets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import pytest

from headrace.inference.v1 import inference_pb2, priority_pb2
from headrace_common.errors import HeadraceError, InvalidRequest, PermissionDenied
from headrace_common.rpc.status import error_from_rpc
from headrace_common.telemetry import schema
from tests.component.router.fakes import Rig, hand_over, reply, text_of
from tests.waiting import until

_KEYS = {"chat": "key-chat", "plain": "key-plain", "batch": "key-batch"}
_HIGH, _LOW = priority_pb2.PRIORITY_HIGH, priority_pb2.PRIORITY_LOW


@pytest.fixture
async def keyed(tmp_path: Path) -> AsyncIterator[Rig]:
    """Tenant "chat" may use every class, and "batch" the low one."""
    path = tmp_path / "keys"
    path.write_text("".join(f"{key} {tenant}\n" for tenant, key in _KEYS.items()))
    rig = await Rig(api_keys_file=str(path)).start()
    rig.policy.policy.tenant_priorities["chat"] = _HIGH
    rig.policy.policy.tenant_priorities["batch"] = _LOW
    yield rig
    await rig.close()


async def test_a_class_above_the_granted_one_is_refused_by_name(keyed: Rig) -> None:
    rig = keyed
    decode = await rig.add_decode(reply("ok"))
    for tenant, priority in (("plain", _HIGH), ("batch", _HIGH), ("batch", 2)):
        error = await rig.error_of(priority=priority, key=_KEYS[tenant])
        assert isinstance(error, PermissionDenied)
        assert error.metadata["field"] == "priority"
    unknown = await rig.error_of(priority=9, key=_KEYS["chat"])
    assert isinstance(unknown, InvalidRequest)
    assert list(unknown.violations) == ["priority"]
    assert not decode.requests
    assert rig.router.admission.requests == 0
    for tenant, priority, sent in (
        ("chat", _HIGH, _HIGH),
        ("plain", 0, 0),
        ("plain", _LOW, _LOW),
        ("batch", 0, _LOW),
    ):
        name = f"{tenant}-{priority}"
        answer = await rig.ask(priority=priority, request_id=name, key=_KEYS[tenant])
        assert text_of(answer) == "ok"
        assert decode.requests[-1].priority == sent
    (root,) = [
        span for span in (await rig.trace_of("batch-0")).spans if span.name == schema.SPAN_REQUEST
    ]
    assert root.attributes[schema.ATTRIBUTE_PRIORITY] == "low"
    # A change of the policy holds for the next request.
    del rig.policy.policy.tenant_priorities["chat"]
    again = await rig.error_of(priority=_HIGH, key=_KEYS["chat"])
    assert isinstance(again, PermissionDenied)


async def test_over_http_the_class_is_the_number_of_vllm(rig: Rig) -> None:
    decode = await rig.add_decode(reply("ok"))
    for number, priority in ((0, 0), (1, _LOW)):
        status, _, body = await rig.post({"prompt": "a prompt", "priority": number})
        assert (status, body["choices"][0]["text"]) == (200, "ok")
        assert decode.requests[-1].priority == priority
    status, _, body = await rig.post({"prompt": "a prompt", "priority": -1})
    assert (status, body["error"]["code"]) == (403, "permission_denied")
    status, _, body = await rig.post({"prompt": "a prompt", "priority": 7})
    assert (status, body["error"]["param"]) == (400, "priority")
    rig.policy.policy.tenant_priorities["default"] = _HIGH
    status, _, _ = await rig.post({"prompt": "a prompt", "priority": -1})
    assert (status, decode.requests[-1].priority) == (200, _HIGH)


async def test_prompts_of_a_higher_class_are_computed_first(rig: Rig) -> None:
    rig.policy.policy.tenant_priorities["default"] = _HIGH
    await rig.add_decode(reply("ok"))
    worker = await rig.add_prefill(hand_over, credit=0)
    classes = {"low": _LOW, "normal": 0, "high": _HIGH}
    tasks = []
    for name, priority in classes.items():
        asking = rig.ask(request_id=name, priority=priority, timeout_s=60.0)
        tasks.append(asyncio.create_task(asking))
    await until(lambda: rig.router.queue.depth == len(classes))
    await worker.give_credit(len(classes))
    assert [text_of(response) for response in await asyncio.gather(*tasks)] == ["ok"] * 3
    assert [task.request_id for task in worker.tasks] == ["high", "normal", "low"]


async def _route(rig: Rig, **fields: int) -> HeadraceError | inference_pb2.RouteResponse:
    request = inference_pb2.GenerateRequest(text="a prompt", **fields)  # type: ignore[arg-type]
    try:
        response = await rig.operator_stub.Route(
            inference_pb2.RouteRequest(request=request), timeout=60.0
        )
    except grpc.aio.AioRpcError as error:
        return error_from_rpc(error)
    assert isinstance(response, inference_pb2.RouteResponse)
    return response


async def test_route_needs_the_same_grant(rig: Rig) -> None:
    await rig.add_decode(reply("ok"))
    assert isinstance(await _route(rig, priority=_HIGH), PermissionDenied)
    assert isinstance(await _route(rig, priority=_LOW), inference_pb2.RouteResponse)
