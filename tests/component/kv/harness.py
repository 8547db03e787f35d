"""Real senders, a real receiver and real gRPC between them, in one process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import grpc.aio
import numpy as np
from numpy.typing import NDArray

from headrace.kv.v1 import handoff_pb2_grpc
from headrace_common.deadlines import Deadline
from headrace_common.errors import StaleIncarnation
from headrace_common.identity import new_transfer_id
from headrace_common.rpc.status import ErrorInterceptor
from headrace_kv.copy_plan import Runs
from headrace_kv.layout import KvDescriptor, KvLayout, RankMemory, WorkerRef
from headrace_kv.leases import Clock, Timers
from headrace_kv.messages import LayerRange, Reservation, SendReport, TransferTarget
from headrace_kv.receive.local_broadcast import LocalBroadcast
from headrace_kv.receive.receiver import IncomingTransfer, Receiver, ReceiverLimits
from headrace_kv.receive.service import HandoffServicer
from headrace_kv.receive.transfer import TransferSummary
from headrace_kv.receive.verification import DigestChecks
from headrace_kv.send.sender import RankSender
from headrace_kv.send.stream import SenderContext, SenderLimits
from headrace_kv.shard_map import heads_held, place_regions
from headrace_kv.transport.base import KvTransport, WriteResult
from headrace_kv.transport.factory import open_transport
from tests.in_memory_transport import FaultPlan, InMemoryTransport, MemoryFabric
from tests.router_key import RouterKey
from tests.waiting import PATIENCE_S, until

BLOCK_TOKENS = 4
TOKEN_BYTES = 6
HEAD_BYTES = BLOCK_TOKENS * TOKEN_BYTES
PARTS = ("k", "v")
LAYERS = 6
BLOCK_COUNT = 40
BLOCKS = (1, 2, 3)
"""Prefill's blocks of the usual prompt."""
TOKENS = 3 * BLOCK_TOKENS
LEASE_S, QUARANTINE_S = 30.0, 1.0
TRANSFER_S = 60.0
"""No transfer and no lease reaches its end by the real clock."""


def make_layout(tensor_parallel_size: int, heads: int = 4, layers: int = LAYERS) -> KvLayout:
    return KvLayout.attention(
        model="kiln-1b:abc",
        dtype="float32",
        layer_count=layers,
        kv_head_count=heads,
        tensor_parallel_size=tensor_parallel_size,
        block_tokens=BLOCK_TOKENS,
        parts=dict.fromkeys(PARTS, TOKEN_BYTES),
    )


class LentTransport(KvTransport):
    """A transport with a registered buffer that several rigs use in turn. Closing Mooncake takes up to a second."""

    def __init__(self, lender: KvTransport) -> None:
        self.name = lender.name
        self.quiet_after_failure_s = lender.quiet_after_failure_s
        self.buffer = np.zeros(1 << 20, dtype=np.uint8)
        self._lender = lender
        lender.register(self.buffer.ctypes.data, self.buffer.nbytes)

    @property
    def session(self) -> str:
        return self._lender.session

    def register(self, base_address: int, nbytes: int) -> None:
        assert base_address == self.buffer.ctypes.data
        assert nbytes <= self.buffer.nbytes

    def submit(self, session: str, runs: Runs, timeout_s: float) -> Future[WriteResult]:
        return self._lender.submit(session, runs, timeout_s)

    def close(self) -> None:
        pass

    def close_lender(self) -> None:
        self._lender.close()


class Arena:
    """One rank's memory: [layer][part][block][head][bytes], registered with its transport."""

    def __init__(
        self, layout: KvLayout, rank: int, transport: KvTransport, block_count: int
    ) -> None:
        heads = len(heads_of(layout, rank))
        shape = (layout.layer_count, len(PARTS), block_count, heads, HEAD_BYTES)
        self.cells: NDArray[np.uint8] = np.zeros(shape, dtype=np.uint8)
        if isinstance(transport, LentTransport):
            self.cells = transport.buffer[: self.cells.nbytes].reshape(shape)
            self.cells[:] = 0
        transport.register(self.cells.ctypes.data, self.cells.nbytes)
        self.memory = RankMemory(
            rank=rank,
            transport=transport.name,
            session=transport.session,
            base_address=self.cells.ctypes.data,
            arena_bytes=self.cells.nbytes,
            regions=place_regions(layout, rank, (block_count,)).regions,
        )


def heads_of(layout: KvLayout, rank: int) -> range:
    """The model's heads that a rank holds."""
    return heads_held(rank, layout.tensor_parallel_size, layout.kv_head_count)


@dataclass
class Rig:
    """A prefill worker and a decode worker. `reports` are those of the prefill ranks."""

    prefill: KvLayout
    decode: KvLayout
    prefill_ref: WorkerRef
    decode_ref: WorkerRef
    endpoint: str
    server: grpc.aio.Server
    receiver: Receiver
    router: RouterKey
    sources: list[Arena]
    destinations: list[Arena]
    senders: list[RankSender]
    transports: list[KvTransport]
    released: list[tuple[str, float]]
    reports: list[SendReport]
    truth: NDArray[np.uint8]

    def reserve(
        self,
        token_count: int = TOKENS,
        *,
        start_token: int = 0,
        timeout_s: float = TRANSFER_S,
        transfer_id: str | None = None,
        first_block: int = 30,
    ) -> IncomingTransfer:
        blocks = -(-token_count // BLOCK_TOKENS) - start_token // BLOCK_TOKENS
        ids = tuple(first_block - index for index in range(blocks))
        reservation = Reservation(transfer_id or new_transfer_id(), ids, start_token, token_count)
        return self.receiver.reserve(reservation, Deadline.after(timeout_s))

    def ticket(self, transfer_id: str, prefill: WorkerRef | None = None) -> bytes:
        """The router's ticket for a transfer, by default for the rig's prefill worker."""
        return self.router.ticket(
            transfer_id,
            prefill=prefill or self.prefill_ref,
            decode=self.decode_ref,
            layout=self.decode,
        )

    def target(self, transfer: IncomingTransfer) -> TransferTarget:
        name = transfer.transfer_id
        return TransferTarget(
            transfer_id=name,
            decode=self.decode_ref,
            handoff_endpoint=self.endpoint,
            start_token=transfer.reservation.start_token,
            end_token=transfer.reservation.end_token,
            deadline_s=time.monotonic() + TRANSFER_S,
            ticket=self.ticket(name),
        )

    def start(self, token_count: int = TOKENS, **reservation: Any) -> IncomingTransfer:
        """A transfer that decode has reserved and prefill opens."""
        transfer = self.reserve(token_count, **reservation)
        self.open(self.target(transfer))
        return transfer

    def send(self, **reservation: Any) -> IncomingTransfer:
        """A transfer of the usual prompt with all layers pushed."""
        transfer = self.start(**reservation)
        self.push(transfer.transfer_id)
        return transfer

    def open(self, target: TransferTarget) -> None:
        for sender in self.senders:
            sender.open(target)

    def push(
        self,
        transfer_id: str,
        block_ids: tuple[int, ...] = BLOCKS,
        start_token: int = 0,
        end_token: int = TOKENS,
        layers: range | None = None,
    ) -> None:
        for layer in layers or range(self.prefill.layer_count):
            layer_range = LayerRange(
                transfer_id, layer, start_token, end_token, block_ids, time.time_ns()
            )
            for sender in self.senders:
                sender.push(layer_range)

    def finish(self, transfer_id: str) -> None:
        for sender in self.senders:
            sender.finish(transfer_id)

    async def received(
        self,
        transfer: IncomingTransfer,
        source_blocks: tuple[int, ...] = BLOCKS,
        first_block: int = 0,
    ) -> TransferSummary:
        """Waits for a transfer. Every decode rank then has its heads' bytes in the reserved blocks.

        These are the bytes from logical block `first_block` on. Of the last block, only the reserved tokens count.
        """
        summary = await transfer.wait()
        ids = list(transfer.reservation.block_ids)
        spare_tokens = -transfer.reservation.end_token % BLOCK_TOKENS
        last_bytes = HEAD_BYTES - spare_tokens * TOKEN_BYTES
        sent = list(source_blocks[first_block:][: len(ids)])
        for rank, arena in enumerate(self.destinations):
            expected = self.truth[:, :, sent][:, :, :, heads_of(self.decode, rank)]
            actual = arena.cells[:, :, ids]
            for cells in (expected, actual):
                cells[:, :, -1, :, last_bytes:] = 0
            assert np.array_equal(actual, expected), f"decode rank {rank}"
        return summary

    async def quiet(self, transfer_id: str, timeout_s: float = PATIENCE_S) -> list[SendReport]:
        """The reports of all prefill ranks for one transfer."""
        await until(
            lambda: (
                len([r for r in self.reports if r.transfer_id == transfer_id]) == len(self.senders)
            ),
            timeout_s,
        )
        return [report for report in self.reports if report.transfer_id == transfer_id]

    def is_sending(self, transfer_id: str) -> bool:
        """Whether the transfer is not quiet at some prefill rank."""
        return any(transfer_id in sender.active_transfers() for sender in self.senders)

    def released_ids(self) -> list[str]:
        return [transfer_id for transfer_id, _ in self.released]


TransportSource = Callable[[str, int], KvTransport]
"""Makes the transport of ("prefill" | "decode", rank)."""


def memory_transports(
    faults: FaultPlan | None = None, quiet_after_failure_s: float = 0.0
) -> TransportSource:
    """In-memory transports that reach only each other. The prefill ranks have the faults."""
    fabric = MemoryFabric()

    def make(role: str, rank: int) -> KvTransport:
        return InMemoryTransport(
            faults if role == "prefill" else None,
            fabric=fabric,
            quiet_after_failure_s=quiet_after_failure_s,
        )

    return make


class LentMooncake:
    """A TransportSource of Mooncake transports, made once for each role and rank."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, int], LentTransport] = {}

    def __call__(self, role: str, rank: int) -> KvTransport:
        if (role, rank) not in self._made:
            lender = open_transport("mooncake", "127.0.0.1", "tcp")
            self._made[role, rank] = LentTransport(lender)
        return self._made[role, rank]

    def close(self) -> None:
        for transport in self._made.values():
            transport.close_lender()


@asynccontextmanager
async def running(
    prefill: KvLayout | int = 1,
    decode: KvLayout | int = 1,
    transports: TransportSource | None = None,
    *,
    faults: FaultPlan | None = None,
    quiet_after_failure_s: float = 0.0,
    receiver_timers: Timers | None = None,
    sender_clock: Clock | None = None,
    claimed_decode: WorkerRef | None = None,
    receiver_limits: ReceiverLimits | None = None,
    sender_limits: SenderLimits | None = None,
    make_broadcast: Callable[[KvDescriptor], LocalBroadcast] = LocalBroadcast,
    make_checks: Callable[[KvDescriptor], DigestChecks] | None = None,
) -> AsyncIterator[Rig]:
    """Starts both workers. A number of ranks stands for the usual layout. Prefill's memory has random bytes, `truth`.

    Without `transports`, they are memory_transports(faults, quiet_after_failure_s). With `claimed_decode`, the senders
    expect that worker at decode's address. `make_broadcast` is for a decode layout with a broadcast_width.
    `receiver_timers` and `sender_clock` are the real ones unless given.
    """
    loop = asyncio.get_running_loop()
    prefill, decode = (
        make_layout(layout) if isinstance(layout, int) else layout for layout in (prefill, decode)
    )
    transports = transports or memory_transports(faults, quiet_after_failure_s)
    decode_ref = WorkerRef("decode-0", "d" * 16)
    router = RouterKey()
    prefill_ref = WorkerRef("prefill-0", "a" * 16)
    reports: list[SendReport] = []
    released: list[tuple[str, float]] = []
    decode_transports = [transports("decode", r) for r in range(decode.tensor_parallel_size)]
    destinations = [Arena(decode, r, t, BLOCK_COUNT) for r, t in enumerate(decode_transports)]
    memories = tuple(arena.memory for arena in destinations)
    local = decode.broadcast_width > 1
    broadcast = make_broadcast(KvDescriptor(decode, memories)) if local else None
    checks = make_checks(KvDescriptor(decode, memories)) if make_checks is not None else None
    receiver = Receiver(
        ref=decode_ref,
        layout=decode,
        tickets=router.tickets(decode_ref, decode),
        lease_ttl_s=LEASE_S,
        on_released=lambda transfer_id: released.append((transfer_id, time.monotonic())),
        quarantine_s=QUARANTINE_S,
        limits=receiver_limits,
        timers=receiver_timers,
        broadcast=broadcast,
        checks=checks,
    )
    server = grpc.aio.server(interceptors=[ErrorInterceptor()])
    handoff_pb2_grpc.add_HandoffServiceServicer_to_server(HandoffServicer(receiver), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    prefill_transports = [transports("prefill", r) for r in range(prefill.tensor_parallel_size)]
    sources = [Arena(prefill, r, t, BLOCK_COUNT) for r, t in enumerate(prefill_transports)]
    shape = (prefill.layer_count, len(PARTS), BLOCK_COUNT, prefill.kv_head_count, HEAD_BYTES)
    truth = np.random.default_rng(1).integers(1, 256, shape, dtype=np.uint8)
    for rank, arena in enumerate(sources):
        arena.cells[:] = truth[:, :, :, heads_of(prefill, rank)]
    # The descriptor has prefill's own dimensions, so that only decode refuses a layout that differs.
    described = replace(
        prefill,
        tensor_parallel_size=decode.tensor_parallel_size,
        broadcast_width=decode.broadcast_width,
    )
    descriptor = KvDescriptor(described, memories)

    async def descriptors(ref: WorkerRef, deadline: Deadline) -> KvDescriptor:
        if claimed_decode is None and ref != decode_ref:
            raise StaleIncarnation(f"{ref} is gone")
        return descriptor

    senders = [
        RankSender(
            SenderContext(
                ref=prefill_ref,
                rank=rank,
                layout=prefill,
                memory=arena.memory,
                transport=transport,
                descriptors=descriptors,
                event_loop=loop,
                on_quiet=reports.append,
                clock=sender_clock or Clock(),
            ),
            limits=sender_limits,
        )
        for rank, (arena, transport) in enumerate(zip(sources, prefill_transports, strict=True))
    ]
    rig = Rig(
        prefill=prefill,
        decode=decode,
        prefill_ref=prefill_ref,
        decode_ref=claimed_decode or decode_ref,
        endpoint=f"127.0.0.1:{port}",
        server=server,
        receiver=receiver,
        router=router,
        sources=sources,
        destinations=destinations,
        senders=senders,
        transports=[*prefill_transports, *decode_transports],
        released=released,
        reports=reports,
        truth=truth,
    )
    try:
        yield rig
    finally:
        for sender in senders:
            sender.close()
        await asyncio.gather(*(asyncio.wrap_future(sender.closed) for sender in senders))
        receiver.close()
        await server.stop(1.0)
        for helper in (broadcast, checks):
            if helper is not None:
                await asyncio.to_thread(helper.close)
        for transport in rig.transports:
            transport.close()
