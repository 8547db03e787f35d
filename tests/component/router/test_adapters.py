"""Requests with a LoRA adapter reach only workers that have it, under a salt of their own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from headrace.inference.v1 import adapter_pb2, inference_pb2
from headrace.registry.v1 import registry_pb2
from headrace_common.registry.adapters import Adapter
from headrace_kv.layout import WorkerRef
from tests.kit.router import Rig
from tests.kit.workers import hand_over, reply
from tests.waiting import until

REMOTE = inference_pb2.PREFILL_PLACEMENT_REMOTE
POET = adapter_pb2.Adapter(name="poet", digest="0a")
OTHER_POET = adapter_pb2.Adapter(name="poet", digest="0b")


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    """Two decode workers, of which the busier one has the adapter, and two prefill workers."""
    rig = await Rig().start()
    try:
        idle, busy = await rig.add_decodes(reply("idle"), reply("busy"))
        busy.change_member(adapters=[POET])
        idle.change_member(adapters=[adapter_pb2.Adapter(name="coder", digest="0c")])
        rig.refresh()
        await until(lambda: "poet" in rig.router.workers.adapters().get("sim", {}))
        await rig.add_prefill(hand_over, 4, OTHER_POET)
        await rig.add_prefill(hand_over, 4, POET)
        yield rig
    finally:
        await rig.close()


async def test_only_workers_with_the_adapter_get_its_requests(rig: Rig) -> None:
    idle, busy = rig.decodes
    other, poet = rig.prefills
    asked: Any = ({"model": "poet"}, {"adapter": "poet"}, {"model": "sim", "adapter": "poet"})
    for fields in asked:
        await rig.ask(prefill_placement=REMOTE, **fields)
    assert (len(idle.requests), len(busy.requests)) == (0, 3)
    assert (len(other.tasks), len(poet.tasks)) == (0, 3)
    messages: list[Any] = [*busy.requests, *poet.tasks]
    assert all(message.adapter == POET for message in messages)
    (salt,) = {message.cache_salt for message in messages}
    await rig.ask()
    assert not idle.requests[-1].HasField("adapter")
    assert salt
    assert idle.requests[-1].cache_salt == ""


async def test_without_a_prefill_worker_that_has_it_decode_prefills(rig: Rig) -> None:
    responses = await rig.ask(model="coder", prefill_placement=REMOTE)
    assert responses[-1].timing.prefill_worker_id == ""
    (request,) = rig.decodes[0].requests
    assert request.adapter.name == "coder"
    assert not request.remote_prefill


async def test_models_are_listed_with_their_adapters(rig: Rig) -> None:
    listed = await rig.models()
    found = [
        (one.name, one.parent, one.prefill_worker_count, one.decode_worker_count)
        for one in listed.models
    ]
    assert found == [("sim", "", 2, 2), ("coder", "sim", 0, 1), ("poet", "sim", 1, 1)]
    async with rig.http() as client:
        models = (await client.get("/v1/models")).json()["data"]
    assert [(one["id"], one.get("parent")) for one in models] == [
        ("sim", None),
        ("coder", "sim"),
        ("poet", "sim"),
    ]


async def test_what_a_worker_announced_before_serves_the_requests_that_named_it(rig: Rig) -> None:
    _, busy = rig.decodes
    poet = Adapter("poet", "0a")
    busy.change_member(adapters=[OTHER_POET])
    rig.refresh()
    await until(lambda: rig.router.workers.adapters()["sim"]["poet"].digest == "0b")
    workers = rig.router.workers.table("sim")
    assert workers.serving(poet).tolist() == [False, True]
    assert workers.serving(Adapter("coder", "0c")).tolist() == [True, False]
    stream = rig.prefills[1]
    member = registry_pb2.Member(
        worker_id=stream.worker_id,
        incarnation=stream.incarnation,
        role=registry_pb2.Member.ROLE_PREFILL,
        adapters=[OTHER_POET],
    )
    queue = rig.router.queue
    queue.workers.update([member])
    assert not any(queue.workers.pulling(poet).values())
    found = queue.workers._streams[WorkerRef(stream.worker_id, stream.incarnation)]
    assert poet in found.usable_adapters
    queue.workers.update([member])
    assert poet in found.usable_adapters
