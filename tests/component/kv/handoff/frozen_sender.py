"""A prefill process that freezes itself within its first write.

Started as `python -m tests.component.kv.handoff.frozen_sender ORDER`, an Order as JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headrace.kv.v1 import layout_pb2
from headrace_common.deadlines import Deadline
from headrace_common.process.kill_timer import KillTimer
from headrace_kv.layout import KvDescriptor, KvLayout, RankMemory, WorkerRef, descriptor_from_proto
from headrace_kv.messages import LayerRange, SendReport, TransferTarget
from headrace_kv.send.sender import RankSender
from headrace_kv.send.stream import SenderContext
from headrace_kv.shard_map import place_regions
from headrace_kv.transport.factory import open_transport
from headrace_kv.transport.write_worker import WriteJob

BLOCK_TOKENS, BLOCKS = 8, 4
TOKENS = BLOCK_TOKENS * BLOCKS
LAYOUT = KvLayout.attention(
    model="frozen:1",
    dtype="float32",
    layer_count=1,
    kv_head_count=1,
    tensor_parallel_size=1,
    block_tokens=BLOCK_TOKENS,
    # So long that an entry is in flight for milliseconds.
    parts={"k": 1 << 20},
)
SENT = 7
"""The value of every byte that is sent."""
FREEZE = "cgroup.freeze"
TIMEOUT_S = 120.0
WOKEN_S = 10.0


@dataclass(frozen=True, slots=True)
class Order:
    """What the sender does. It joins the control group `cgroup`, if there is one, and freezes it.

    Without a control group it stops itself by SIGSTOP. Unless `guarded`, it has no kill timer.
    """

    name: str
    decode: str
    endpoint: str
    descriptor: str
    guarded: bool
    cgroup: str = ""


def freeze(order: Order) -> None:
    """Freezes this process. Returns when it has been woken."""
    if order.cgroup:
        Path(order.cgroup, FREEZE).write_text("1", encoding="utf-8")
    else:
        # To this thread, which then stops before its next instruction.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


def freeze_within_a_write(order: Order) -> None:
    """Changes the transports: the process freezes once Mooncake has an entry."""
    submit: Callable[..., int] = WriteJob.submit
    calls = 0

    def submit_and_freeze(job: WriteJob, *arguments: Any) -> int:
        nonlocal calls
        started = submit(job, *arguments)
        calls += 1
        if calls == 1:
            freeze(order)
            # Mooncake's threads go on before this one gives the engine up.
            time.sleep(WOKEN_S)
        return started

    setattr(WriteJob, "submit", submit_and_freeze)  # noqa: B010


async def send(order: Order) -> None:
    """Sends one transfer, and returns when it is quiet."""
    descriptor = descriptor_from_proto(
        layout_pb2.KvDescriptor.FromString(bytes.fromhex(order.descriptor))
    )
    transport = open_transport("mooncake", "127.0.0.1", "tcp")
    placed = place_regions(LAYOUT, 0, (BLOCKS,))
    arena = np.full(placed.arena_bytes, SENT, np.uint8)
    address = int(arena.ctypes.data)
    transport.register(address, arena.nbytes)

    async def descriptors(ref: WorkerRef, deadline: Deadline) -> KvDescriptor:
        return descriptor

    loop = asyncio.get_running_loop()
    quiet = asyncio.Event()

    def quiet_on_loop(report: SendReport) -> None:
        loop.call_soon_threadsafe(quiet.set)

    sender = RankSender(
        SenderContext(
            ref=WorkerRef(order.name, "1"),
            rank=0,
            layout=LAYOUT,
            memory=RankMemory(
                0, transport.name, transport.session, address, arena.nbytes, placed.regions
            ),
            transport=transport,
            descriptors=descriptors,
            event_loop=loop,
            on_quiet=quiet_on_loop,
            kill_timer=KillTimer() if order.guarded else None,
        )
    )
    decode = WorkerRef(*order.decode.split("@"))
    deadline_s = time.monotonic() + TIMEOUT_S
    sender.open(TransferTarget(order.name, decode, order.endpoint, 0, TOKENS, deadline_s))
    sender.push(LayerRange(order.name, 0, 0, TOKENS, tuple(range(BLOCKS)), time.time_ns()))
    async with asyncio.timeout(TIMEOUT_S):
        await quiet.wait()
    sender.close()
    await asyncio.wrap_future(sender.closed)
    transport.close()


def main() -> None:
    order = Order(**json.loads(sys.argv[1]))
    if order.cgroup:
        Path(order.cgroup, "cgroup.procs").write_text(str(os.getpid()), encoding="utf-8")
    freeze_within_a_write(order)
    asyncio.run(send(order))


if __name__ == "__main__":
    main()
