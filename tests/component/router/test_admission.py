"""Admission over real gRPC: keys, bounds, fair shares, deadlines."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import grpc.aio
import pytest

from headrace.inference.v1 import inference_pb2
from headrace_common.errors import ConfigError, QueueFull, Unauthenticated
from headrace_common.rpc.status import error_from_rpc
from tests.component.router.fakes import Rig, hang, reply, with_settings
from tests.waiting import until

_KEYS = {"greedy": "key-greedy", "late": "key-late"}


@pytest.fixture
async def rig(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Rig]:
    path = tmp_path / "keys"
    path.write_text("".join(f"{key} {tenant}\n" for tenant, key in _KEYS.items()))
    rig = await Rig(api_keys_file=str(path), **getattr(request, "param", {})).start()
    yield rig
    await rig.close()


async def _ask(rig: Rig, tenant: str, timeout_s: float = 10.0, text: str = "x") -> str:
    """Returns the text or raises the error. A tenant without a key sends its name as the key."""
    call = rig.stub.Generate(
        inference_pb2.GenerateRequest(text=text),
        timeout=timeout_s,
        metadata=(("authorization", f"Bearer {_KEYS.get(tenant, tenant)}"),),
    )
    try:
        return "".join([response.text async for response in call])
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error) from error
    finally:
        call.cancel()


async def _errors(tasks: Sequence[asyncio.Task[str]]) -> list[object]:
    for task in tasks:
        task.cancel()
    return await asyncio.gather(*tasks, return_exceptions=True)


async def test_with_a_keys_file_a_key_is_required_and_never_logged(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    decode = await rig.add_decode(reply("ok"))
    with pytest.raises(Unauthenticated, match="not known here"):
        await _ask(rig, "wrong-key")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rig.ask("x")
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert "x-api-key" in (caught.value.details() or "")
    assert not decode.requests
    assert await _ask(rig, "late") == "ok"
    assert "wrong-key" not in caplog.text
    assert "key-late" not in caplog.text


async def test_a_router_does_not_start_without_its_keys_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="absent cannot be read"):
        await Rig(api_keys_file=str(tmp_path / "absent")).start()


@with_settings(max_concurrent_requests=4)
async def test_a_tenant_gets_the_share_of_its_weight(rig: Rig) -> None:
    rig.policy.policy.tenant_weights["late"] = 3.0
    decode = await rig.add_decode(hang)
    greedy = [asyncio.create_task(_ask(rig, "greedy")) for _ in range(4)]
    await until(lambda: len(decode.requests) == 4)
    late = [asyncio.create_task(_ask(rig, "late")) for _ in range(4)]
    # The last is above its share of three.
    await until(lambda: sum(task.done() for task in late) == 1)
    for task in greedy[:3]:
        task.cancel()
    await until(lambda: len(decode.requests) == 7)
    (refused,) = (
        error for error in await _errors([*greedy, *late]) if isinstance(error, QueueFull)
    )
    assert refused.retry_after_s
    assert refused.metadata["tenant_share"] == "3"


@with_settings(max_queued_tokens=100, admission_wait_s=0.2)
async def test_queued_prompts_are_bounded_by_their_tokens(rig: Rig) -> None:
    decode = await rig.add_decode(hang)
    waiting = asyncio.create_task(_ask(rig, "greedy", text="x" * 80))
    await until(lambda: len(decode.requests) == 1)
    with pytest.raises(QueueFull, match="queued tokens"):
        await _ask(rig, "greedy", text="x" * 30)
    assert len(decode.requests) == 1
    decode.script = reply("ok")
    assert await _ask(rig, "greedy", text="x" * 20) == "ok"
    await _errors([waiting])
    # The end of the waiting request has released its tokens.
    assert await _ask(rig, "greedy", text="x" * 99) == "ok"
