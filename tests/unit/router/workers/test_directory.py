"""The decode workers of the registry, the load reserved on them, and when their channels close."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio

from headrace.registry.v1 import registry_pb2
from headrace_kv.layout.layout import KvLayout, WorkerRef
from headrace_kv.layout.proto import layout_to_proto
from headrace_router.workers.directory import WorkerDirectory
from headrace_router.workers.slots import DecodeSlots
from headrace_router.workers.table import Load, LoadTable
from tests.waiting import until

_LAYOUT = KvLayout.attention(
    model="sim", dtype="float32", layer_count=4, kv_head_count=2, block_tokens=16, parts={"kv": 64}
)
_REF = WorkerRef("d0", "a")


def _member(max_model_len: int = 4_096) -> registry_pb2.Member:
    return registry_pb2.Member(
        role=registry_pb2.Member.ROLE_DECODE,
        worker_id=_REF.worker_id,
        incarnation=_REF.incarnation,
        endpoint="127.0.0.1:1",
        model="sim",
        max_model_len=max_model_len,
        max_num_seqs=8,
        layout=layout_to_proto(_LAYOUT),
    )


async def test_the_channel_of_a_worker_that_left_closes_after_its_last_request() -> None:
    channels: list[grpc.aio.Channel] = []

    def open_channel(endpoint: str) -> grpc.aio.Channel:
        channels.append(grpc.aio.insecure_channel(endpoint))
        return channels[-1]

    directory = WorkerDirectory(open_channel, b"")
    directory.update([_member()])
    directory.update([_member(max_model_len=1_024)])
    assert directory.max_model_len() == {"sim": 1_024}
    first, last = (directory.reserve_load(_REF, 100) for _ in range(2))
    assert first is not None
    assert last is not None
    table = directory.table("sim")
    assert (table.requests.tolist(), table.held_tokens.tolist()) == ([2], [200])
    first.release()
    first.release()
    assert (table.requests.tolist(), table.held_tokens.tolist()) == ([1], [100])
    directory.update([])
    assert directory.reserve_load(_REF, 100) is None
    (channel,) = channels
    await asyncio.sleep(0)
    assert channel.get_state() is not grpc.ChannelConnectivity.SHUTDOWN
    last.release()
    await until(lambda: channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN)


async def test_the_slots_of_reachable_workers_are_reported_with_the_number_of_routers() -> None:
    seen: list[tuple[str, DecodeSlots]] = []
    directory = WorkerDirectory(
        grpc.aio.insecure_channel, b"", on_slots=lambda *change: seen.append(change)
    )
    router = registry_pb2.Member(role=registry_pb2.Member.ROLE_ROUTER)
    directory.update([_member(), router, router])
    # The worker has not reported yet.
    assert seen == [("sim", DecodeSlots(0, 0, 2))]
    directory.update([_member(), router])
    directory.update([_member(), router])
    assert seen[1:] == [("sim", DecodeSlots(0, 0, 1))]
    directory.update([router])
    assert directory.reserve_load(_REF, 1) is None
    await directory.close()


async def test_slots_count_workers_that_accept_requests() -> None:
    directory = WorkerDirectory(grpc.aio.insecure_channel, b"")
    directory.update([_member()])
    worker = directory.worker(_REF)
    assert worker is not None
    await directory.close()
    table = LoadTable([worker])
    for load, expected in (
        (Load(external_requests=3), (8, 3)),
        (Load(external_requests=3, draining=True), (0, 0)),
        (Load(external_requests=3, reachable=False), (0, 0)),
    ):
        table.set(_REF, load)
        assert table.slots(2) == DecodeSlots(*expected, routers=2)
