"""Who is written to next."""

from __future__ import annotations

import asyncio
from collections import Counter

import numpy as np

from headrace_common.deadlines import Deadline
from headrace_common.errors import TransferFailed
from headrace_kv.handoff.clock import Clock
from headrace_kv.handoff.messages import LayerRange, TransferTarget
from headrace_kv.layout.layout import KvDescriptor, KvLayout, WorkerRef
from headrace_kv.plan.copy_plan import BlockSpan, Runs
from headrace_kv.plan.shard_map import Edge
from headrace_kv.send.layer_write import LayerWrite, PieceCopy
from headrace_kv.send.peer import SenderPeer
from headrace_kv.send.round_robin import RoundRobinQueue
from headrace_kv.send.stream import HandoffLink
from headrace_kv.send.transfer import OutgoingTransfer
from headrace_kv.send.write_window import WriteWindow
from headrace_kv.transport.in_memory import InMemoryTransport

LAYOUT = KvLayout.attention(
    model="m:1",
    dtype="float32",
    layer_count=1,
    kv_head_count=1,
    tensor_parallel_size=1,
    block_tokens=4,
    parts={"kv": 4},
)
NOTHING = np.zeros(0, dtype=np.int64)


class NoEvents:
    """Links that are never started have nothing to tell."""

    def link_ready(self, *_: object) -> None: ...
    def link_reserved(self, *_: object) -> None: ...
    def link_cancelled(self, *_: object) -> None: ...
    def link_ended(self, *_: object) -> None: ...


async def no_descriptor(ref: WorkerRef, deadline: Deadline) -> KvDescriptor:
    raise AssertionError("links that are never started ask for nothing")


async def peer_with(name: str, writes: int) -> SenderPeer:
    """A worker to which so many copies of 100 bytes are to be written."""
    link = HandoffLink(
        ref=WorkerRef("p", "1"),
        rank=0,
        layout=LAYOUT,
        decode=WorkerRef(name, "1"),
        endpoint="",
        descriptors=no_descriptor,
        loop=asyncio.get_running_loop(),
        events=NoEvents(),
        handshake_timeout_s=1.0,
        clock=Clock(),
    )
    peer = SenderPeer(link)
    transfer = OutgoingTransfer(TransferTarget(name, link.decode, "", 0, 4, 0.0), 0.0)
    transport = InMemoryTransport()
    copy = PieceCopy(Edge(0, 0, 0, 0, 1), BlockSpan(0, 4, NOTHING, 0, NOTHING, 0))
    one = Runs(np.array([0]), np.array([0]), np.array([100]))
    for _ in range(writes):
        piece = LayerRange(name, 0, 0, 4, (0,), 0)
        peer.backlog.append((transfer, LayerWrite(piece, copy, name, one, transport)))
    return peer


async def test_a_full_window_holds_up_no_other_worker() -> None:
    full = {"slow"}
    turns = RoundRobinQueue(lambda session, nbytes: session not in full)
    for name in ("slow", "a", "b"):
        turns.give(await peer_with(name, 3))
    served = Counter[str]()
    order = []
    for _ in range(6):
        step = turns.next_step()
        assert step is not None
        _, transfer, write = step
        assert write is not None
        write.take()
        order.append(transfer.transfer_id)
        served[transfer.transfer_id] += 1
    assert served == {"a": 3, "b": 3}
    assert order[:4] in (["a", "b", "a", "b"], ["b", "a", "b", "a"])
    assert turns.next_step() is None
    full.clear()
    idle = [turns.idle]
    turns.write_ended()
    assert [*idle, turns.idle] == [True, False]
    for _ in range(3):
        step = turns.next_step()
        assert step is not None
        assert step[2] is not None
        step[2].take()
    assert turns.next_step() is None
    assert turns.idle


async def test_stopped_transfers_are_passed_over() -> None:
    turns = RoundRobinQueue(lambda session, nbytes: True)
    peer = await peer_with("a", 3)
    peer.backlog[0][0].stopped = True
    turns.give(peer)
    assert turns.next_step() is None
    assert not peer.backlog


async def test_room_comes_back_write_by_write() -> None:
    transport = InMemoryTransport()
    transport.pending_limit, transport.byte_limit = 3, 250
    writes = WriteWindow(transport, Clock())
    pending = []
    peer = await peer_with("nowhere", 3)
    for count in range(2):
        assert writes.has_room("nowhere", 100)
        transfer, write = peer.backlog[count]
        started, future = writes.submit(transfer, peer, write, 5.0)
        # Nobody has such a session.
        assert isinstance(future.exception(), TransferFailed)
        pending.append(started)
        assert transfer.pending_count == count + 1
    assert not writes.has_room("nowhere", 100)
    assert writes.has_room("nowhere", 50)
    assert writes.has_room("elsewhere", 10_000)
    assert writes.overdue(1e12, 0.0)
    assert not writes.overdue(0.0, 0.0)
    writes.remove(pending[0])
    assert writes.has_room("nowhere", 100)
    writes.remove(pending[1])
    assert not writes.overdue(1e12, 0.0)
    assert peer.backlog[0][0].pending_count == 0
