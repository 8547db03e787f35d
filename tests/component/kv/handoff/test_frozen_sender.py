"""A prefill process that is frozen within a write, and woken after its lease and decode's quarantine (I1).

Each test freezes two processes, one of them without the kill timer. Once decode has released their blocks, other
bytes stand there, and both are woken. The process without the timer writes into these blocks. This shows that the
other one would.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import socket
import struct
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import grpc.aio
import numpy as np
import pytest

from headrace.kv.v1 import handoff_pb2_grpc
from headrace_common.deadlines import Deadline
from headrace_common.rpc.status import ErrorInterceptor
from headrace_kv.layout import KvDescriptor, RankMemory, WorkerRef, descriptor_to_proto
from headrace_kv.messages import Reservation
from headrace_kv.receive.receiver import Receiver, ReceiverLimits
from headrace_kv.receive.service import HandoffServicer
from headrace_kv.shard_map import place_regions
from headrace_kv.tickets import NoTickets
from headrace_kv.transport import guard
from headrace_kv.transport.base import session_of
from headrace_kv.transport.factory import open_transport
from headrace_kv.transport.guard import open_listeners, own_tcp_sockets
from tests.component.kv.handoff.frozen_sender import BLOCKS, FREEZE, LAYOUT, SENT, TOKENS, Order
from tests.waiting import until

DECODE = WorkerRef("decode-0", "1")
OTHER = 9
"""The value of the bytes of another request."""
GUARDED, UNGUARDED = "guarded", "unguarded"
# A real clock, because the kernel ends the frozen process.
LEASE_S, QUARANTINE_S = 1.5, 2.0
# How long a process may take to start and to write, or to write on.
PATIENCE_S = 60.0
SO_DETACH_FILTER = 27
# Classic BPF: drop packets of more than 500 bytes.
SMALL_PACKETS = b"".join(
    struct.pack("@HBBI", *instruction)
    for instruction in ((0x80, 0, 0, 0), (0x25, 1, 0, 500), (6, 0, 0, 0xFFFFFFFF), (6, 0, 0, 0))
)


@dataclass(frozen=True, slots=True)
class Freezer:
    """A way to freeze a process from within. `frozen` reads whether a process is, `wake` wakes it."""

    order: Callable[[Order], Order]
    frozen: Callable[[Order, int], bool]
    wake: Callable[[Order, int], None]


def _stopped(order: Order, pid: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except FileNotFoundError:
        return False
    return text.rpartition(")")[2].split()[0] == "T"


def _continue(order: Order, pid: int) -> None:
    # Its timer may have ended it already.
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


SIGNAL = Freezer(lambda order: order, _stopped, _continue)


@contextmanager
def control_groups(root: Path) -> Iterator[Freezer]:
    """A control group for each sender, or a skipped test where the machine allows none."""
    made: list[Path] = []

    def order_in_group(order: Order) -> Order:
        folder = root / f"headrace-test-{os.getpid()}-{order.name}"
        folder.mkdir()
        made.append(folder)
        return replace(order, cgroup=str(folder))

    def is_frozen(order: Order, pid: int) -> bool:
        return "frozen 1" in Path(order.cgroup, "cgroup.events").read_text(encoding="utf-8")

    def wake(order: Order, pid: int) -> None:
        Path(order.cgroup, FREEZE).write_text("0", encoding="utf-8")

    probe = root / f"headrace-test-{os.getpid()}"
    try:
        probe.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made in {root}: {error}")
    usable = (probe / FREEZE).exists()
    probe.rmdir()
    if not usable:
        pytest.skip(f"{root} cannot freeze processes")
    try:
        yield Freezer(order_in_group, is_frozen, wake)
    finally:
        for folder in made:
            (folder / FREEZE).write_text("0", encoding="utf-8")
            folder.rmdir()


class Decode:
    """A decode worker with memory for both senders' blocks."""

    def __init__(self) -> None:
        self.released: set[str] = set()
        self.receiver = Receiver(
            ref=DECODE,
            layout=LAYOUT,
            tickets=NoTickets(),
            on_released=self.released.add,
            lease_ttl_s=LEASE_S,
            quarantine_s=QUARANTINE_S,
            # The stream of a rank that does not answer a Cancel is ended after this time.
            limits=ReceiverLimits(quiesce_timeout_s=0.1),
        )
        known = open_listeners()
        self.transport = open_transport("mooncake", "127.0.0.1", "tcp")
        self.placed = place_regions(LAYOUT, 0, (2 * BLOCKS,))
        self.memory = np.zeros(self.placed.arena_bytes, np.uint8)
        self.transport.register(int(self.memory.ctypes.data), self.memory.nbytes)
        self.hold_bytes(known)
        self.server = grpc.aio.server(interceptors=[ErrorInterceptor()])
        handoff_pb2_grpc.add_HandoffServiceServicer_to_server(
            HandoffServicer(self.receiver), self.server
        )
        self.endpoint = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"

    def hold_bytes(self, known: frozenset[int]) -> None:
        """Mooncake's data port drops the packets of KV, so that no write can end before its sender is frozen."""
        handshake = (session_of("mooncake", self.transport.session) or "").rpartition(":")[2]
        self.data_ports = {
            own.local_port
            for own in own_tcp_sockets()
            if own.listens
            and not own.close_on_exec
            and own.inode not in known
            and str(own.local_port) != handshake
        }
        code = ctypes.create_string_buffer(SMALL_PACKETS, len(SMALL_PACKETS))
        header = struct.pack("@HP", len(SMALL_PACKETS) // 8, ctypes.addressof(code))
        for own in own_tcp_sockets():
            if own.listens and own.local_port in self.data_ports:
                own.copy.setsockopt(socket.SOL_SOCKET, guard._SO_ATTACH_FILTER, header)

    def pass_bytes(self) -> None:
        """The sender's kernel sends the dropped packets again."""
        for own in own_tcp_sockets():
            if own.local_port in self.data_ports:
                own.copy.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)

    def describe(self) -> str:
        """The worker's descriptor, as the senders read it."""
        memory = RankMemory(
            0,
            self.transport.name,
            self.transport.session,
            int(self.memory.ctypes.data),
            self.memory.nbytes,
            self.placed.regions,
        )
        proto = descriptor_to_proto(KvDescriptor(LAYOUT, (memory,)))
        return proto.SerializeToString(deterministic=True).hex()

    def reserve(self, name: str, first_block: int) -> None:
        ids = tuple(range(first_block, first_block + BLOCKS))
        self.receiver.reserve(Reservation(name, ids, 0, TOKENS), Deadline.after(60.0))

    def count(self, first_block: int, value: int) -> int:
        """Bytes with a value in a sender's blocks."""
        half = self.memory.nbytes // 2
        start = 0 if first_block == 0 else half
        return int(np.count_nonzero(self.memory[start : start + half] == value))


@asynccontextmanager
async def decode_worker() -> AsyncIterator[Decode]:
    decode = Decode()
    await decode.server.start()
    try:
        yield decode
    finally:
        decode.receiver.close()
        await decode.server.stop(1.0)
        decode.transport.close()


@asynccontextmanager
async def started(order: Order, freezer: Freezer) -> AsyncIterator[asyncio.subprocess.Process]:
    """A sender, which is woken and killed at the end if it still runs."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.component.kv.handoff.frozen_sender"),
        json.dumps(asdict(order)),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            freezer.wake(order, process.pid)
        await process.wait()


def stands_still(freezer: Freezer, order: Order, process: asyncio.subprocess.Process) -> bool:
    """Whether a process is frozen, or has been ended meanwhile."""
    return process.returncode is not None or freezer.frozen(order, process.pid)


async def freeze_and_wake(freezer: Freezer) -> None:
    async with decode_worker() as decode:
        first_blocks = {GUARDED: 0, UNGUARDED: BLOCKS}
        common = (str(DECODE), decode.endpoint, decode.describe())
        orders = {
            name: freezer.order(Order(name, *common, guarded=name == GUARDED))
            for name in first_blocks
        }
        for name, first in first_blocks.items():
            decode.reserve(name, first)
        async with (
            started(orders[GUARDED], freezer) as guarded,
            started(orders[UNGUARDED], freezer) as unguarded,
        ):
            processes = {GUARDED: guarded, UNGUARDED: unguarded}
            for name, process in processes.items():
                await until(partial(stands_still, freezer, orders[name], process), PATIENCE_S)
                decode.receiver.cancel(name, "CANCELLED", "the request was cancelled")
            decode.pass_bytes()
            await until(lambda: decode.released == set(orders), PATIENCE_S)
            decode.memory[:] = OTHER
            for name, process in processes.items():
                if process.returncode is None:
                    freezer.wake(orders[name], process.pid)
            await until(lambda: decode.count(BLOCKS, SENT) > 0, PATIENCE_S, "a late write lands")
            async with asyncio.timeout(PATIENCE_S):
                assert await guarded.wait() == -signal.SIGKILL
            assert unguarded.returncode is None
            assert decode.count(0, OTHER) == decode.memory.nbytes // 2


async def test_a_stopped_sender_ends_before_it_can_write_late() -> None:
    await freeze_and_wake(SIGNAL)


async def test_a_sender_in_a_frozen_cgroup_ends_before_it_can_write_late() -> None:
    root = Path("/sys/fs/cgroup")
    unified = root / "unified" if (root / "unified").is_dir() else root
    with control_groups(unified) as freezer:
        await freeze_and_wake(freezer)
