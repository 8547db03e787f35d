"""Parts of a sender without threads and streams."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import numpy as np

from headrace_common.deadlines import Deadline
from headrace_kv.copy_plan import BlockSpan, Runs
from headrace_kv.layout import KvDescriptor, KvLayout, RankMemory, WorkerRef
from headrace_kv.messages import LayerRange, TransferTarget
from headrace_kv.send.context import SenderContext
from headrace_kv.send.layer_write import LayerWrite
from headrace_kv.send.peer import SenderPeer
from headrace_kv.send.stream import HandoffStream
from headrace_kv.send.transfer import OutgoingTransfer
from headrace_kv.shard_map import Edge
from tests.in_memory_transport import InMemoryTransport

BLOCK_TOKENS = 4
LAYOUT = KvLayout.attention(
    model="m:1",
    dtype="float32",
    layer_count=2,
    kv_head_count=1,
    tensor_parallel_size=1,
    block_tokens=BLOCK_TOKENS,
    parts={"kv": 4},
)
NO_BLOCKS = np.zeros(0, dtype=np.int64)
HUNDRED_BYTES = Runs(np.array([0]), np.array([0]), np.array([100]))


async def no_descriptor(ref: WorkerRef, deadline: Deadline) -> KvDescriptor:
    raise AssertionError("a stream that is not started asks for no descriptor")


def make_transfer(name: str, *, with_hidden_state: bool = False) -> OutgoingTransfer:
    """A transfer to a decode worker of the same name. Its stream is never started; its deadline is at 0."""
    context = SenderContext(
        ref=WorkerRef("p", "1"),
        rank=0,
        layout=LAYOUT,
        memory=cast("RankMemory", None),
        transport=InMemoryTransport(),
        descriptors=no_descriptor,
        event_loop=asyncio.get_running_loop(),
        on_quiet=lambda report: None,
    )
    decode = WorkerRef(name, "1")
    stream = HandoffStream(context, decode, "", cast("Any", None))
    target = TransferTarget(name, decode, "", 0, 2 * BLOCK_TOKENS, 0.0, with_hidden_state)
    return OutgoingTransfer(target, SenderPeer(context, stream), 0, 0.0)


def make_range(name: str, layer: int = 0, end_token: int = BLOCK_TOKENS) -> LayerRange:
    """Tokens from 0 of a transfer's layer."""
    return LayerRange(name, layer, 0, end_token, (0, 1), 0)


def make_write(name: str, layer: int = 0, end_token: int = BLOCK_TOKENS) -> LayerWrite:
    """A write of one batch of 100 bytes to the session `name`."""
    return LayerWrite(
        make_range(name, layer, end_token),
        Edge(0, 0, 0, 0, 1),
        BlockSpan(0, end_token, NO_BLOCKS, 0, NO_BLOCKS, 0),
        name,
        HUNDRED_BYTES,
        InMemoryTransport(),
    )
