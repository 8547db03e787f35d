"""One decode worker and a prefill worker's ranks: real receiver and senders, with a modelled environment.

Network, transport, clock and engines are modelled. Each of their steps is an action that an explorer chooses. The
invariants are checked at every landing and at every end of a transfer.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial

from headrace_common.errors import TransferFailed
from headrace_kv.copy_plan import Runs
from headrace_kv.layout import KvDescriptor, WorkerRef
from headrace_kv.messages import LayerRange, Reservation, SendReport, TransferTarget
from headrace_kv.receive.receiver import IncomingTransfer, Receiver, ReceiverLimits
from headrace_kv.receive.transfer import TransferState
from headrace_kv.tickets import NoTickets
from headrace_kv.transport.base import WriteResult
from tests.model.faults import possible_faults
from tests.model.fingerprint import fingerprint
from tests.model.ground import (
    BLOCK_TOKENS,
    BLOCKS,
    BOUND_S,
    DEADLINE_S,
    LEASE_S,
    QUIESCE_S,
    QUIET_S,
    SENDER_DEADLINE_S,
    Action,
    Script,
    Settings,
    Violation,
    Write,
    layout_of,
    memories,
    region_at,
)
from tests.model.ranks import ModelTransport, Rank
from tests.model.streams import END, ModelStream, SenderEnd, Wire
from tests.model.virtual_time import VirtualDeadline, VirtualTimers


class World:
    """`choices()` are the ordinary next steps, the usual one first. faults.py has the faults."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.timers = VirtualTimers()
        self.prefill = layout_of(settings.ranks, settings)
        self.decode_layout = layout_of(1, settings)
        self.sources = memories(self.prefill, "prefill")
        self.streams: list[ModelStream] = []
        self.writes: list[Write] = []
        self.reserved_s: dict[str, float] = {}
        self.landed: dict[str, set[tuple[int, int, int]]] = {}
        self._numbers = itertools.count(1)
        self.retries_left = settings.retries
        self.problem: Violation | None = None
        self._incarnations = itertools.count(1)
        self._start_decode()
        self.scripts: list[Script] = []
        self._start_prefill()
        self.reserve()

    def _start_prefill(self) -> None:
        incarnation = next(self._incarnations)
        self.ranks = [Rank(self, rank, incarnation) for rank in range(self.settings.ranks)]

    def _start_decode(self) -> None:
        """Starts a decode process with its own memory."""
        incarnation = f"{next(self._incarnations):016x}"
        self.decode_ref = WorkerRef("decode-0", incarnation)
        (self._destination,) = memories(self.decode_layout, f"decode-0/{incarnation}")
        self.descriptor = KvDescriptor(self.decode_layout, (self._destination,))
        self.owners: dict[int, str] = {}
        self.transfers: dict[str, IncomingTransfer] = {}
        self.receiver = Receiver(
            ref=self.decode_ref,
            layout=self.decode_layout,
            tickets=NoTickets(),
            on_released=self._released,
            lease_ttl_s=LEASE_S,
            quarantine_s=self.settings.quarantine_s,
            limits=ReceiverLimits(quiesce_timeout_s=QUIESCE_S),
            timers=self.timers,
        )

    # The engines.

    def reserve(self) -> None:
        """Adds a request: decode reserves its blocks, and every prefill rank opens, computes and pushes."""
        number = next(self._numbers)
        transfer_id = f"x{number}"
        decode = Script(f"decode {transfer_id}")
        decode.steps.append(("reserve", partial(self._reserve, transfer_id)))
        self.scripts.append(decode)
        for rank in self.ranks:
            script = Script(f"rank {rank.rank} {transfer_id}")
            script.steps.append(("open", partial(self._open, rank, transfer_id)))
            for chunk in range(self.settings.chunks):
                for layer in range(self.settings.layers):
                    push = partial(self._push, rank, transfer_id, number, chunk, layer)
                    script.steps.append((f"push {layer}.{chunk}", push))
            script.steps.append(("finish", partial(self._finish, rank, transfer_id)))
            self.scripts.append(script)

    def _reserve(self, transfer_id: str) -> None:
        free = [block for block in range(BLOCKS) if block not in self.owners]
        blocks = tuple(free[: self.settings.chunks])
        for block in blocks:
            self.owners[block] = transfer_id
        reservation = Reservation(transfer_id, blocks, 0, BLOCK_TOKENS * len(blocks))
        now_s = self.timers.time()
        deadline = VirtualDeadline(now_s + DEADLINE_S, self.timers)
        self.landed[transfer_id] = set()
        self.reserved_s[transfer_id] = now_s
        self.transfers[transfer_id] = self.receiver.reserve(reservation, deadline)

    def _open(self, rank: Rank, transfer_id: str) -> None:
        target = TransferTarget(
            transfer_id=transfer_id,
            decode=self.decode_ref,
            handoff_endpoint="",
            start_token=0,
            end_token=BLOCK_TOKENS * self.settings.chunks,
            deadline_s=self.timers.time() + SENDER_DEADLINE_S,
        )
        rank.opened.add(transfer_id)
        rank.sender.open(target)

    def _push(self, rank: Rank, transfer_id: str, number: int, chunk: int, layer: int) -> None:
        first = self._source_block(number)
        layer_range = LayerRange(
            transfer_id,
            layer,
            chunk * BLOCK_TOKENS,
            (chunk + 1) * BLOCK_TOKENS,
            tuple(range(first, first + self.settings.chunks)),
            0,
        )
        rank.sender.push(layer_range)

    def _source_block(self, number: int) -> int:
        """Every transfer has its own source blocks, which identify its writes."""
        return (number - 1) * self.settings.chunks

    def _finish(self, rank: Rank, transfer_id: str) -> None:
        rank.sender.finish(transfer_id)

    def check_quiet(self, rank: Rank, report: SendReport) -> None:
        """I2: from this report on, the engine reuses the source blocks."""
        transfer_id = report.transfer_id
        if transfer_id in rank.reports:
            self.problem = Violation(f"rank {rank.rank} reported {transfer_id} twice")
        rank.reports[transfer_id] = report
        for write in self.writes:
            if write.transport is rank.transport and write.transfer_id == transfer_id:
                # Raised later: the sender survives what its engine raises.
                self.problem = Violation(f"rank {rank.rank} is quiet, but {transfer_id} is written")

    def _released(self, transfer_id: str) -> None:
        self._free_blocks(transfer_id)
        if self.retries_left:
            self.retries_left -= 1
            self.reserve()

    def _free_blocks(self, transfer_id: str) -> None:
        """Frees the transfer's blocks for the next reservation."""
        for block, owner in list(self.owners.items()):
            if owner == transfer_id:
                del self.owners[block]

    def check_step(self) -> None:
        """Raises Violation."""
        self._check_complete()
        self._check_bounds()

    def _check_complete(self) -> None:
        """I3: a complete transfer has every key. Its blocks are freed, so that a later write is a violation."""
        if self.problem is not None:
            raise self.problem
        for transfer_id, transfer in self.transfers.items():
            if transfer.state is not TransferState.FREE or transfer.error is not None:
                continue
            if transfer_id not in self.owners.values():
                continue
            expected = {
                (rank, layer, block)
                for rank in range(self.settings.ranks)
                for layer in range(self.settings.layers)
                for block in transfer.reservation.block_ids
            }
            missing = expected - self.landed[transfer_id]
            if missing:
                raise Violation(f"{transfer_id} is complete, but {sorted(missing)} have not landed")
            self._free_blocks(transfer_id)

    # The network.

    def connect(self, rank: Rank, sender_end: SenderEnd) -> Wire:
        """Makes a rank's new stream. Returns the wire to decode."""
        sender_end.descriptor = self.descriptor
        stream = ModelStream(sender_end, self.receiver, self.timers)
        self.streams.append(stream)
        rank.streams.append(stream)
        return stream.to_decode

    # The transport.

    def submit(
        self, transport: ModelTransport, session: str, runs: Runs, timeout_s: float
    ) -> Future[WriteResult]:
        keys = frozenset(self._keys(transport.rank, runs))
        transfer_id = f"x{self._number_of(transport.rank, runs)}"
        future: Future[WriteResult] = Future()
        end_s = self.timers.time() + timeout_s
        self.writes.append(Write(transport, session, transfer_id, keys, end_s, future))
        return future

    def _keys(self, rank: int, runs: Runs) -> Iterator[tuple[int, int, int]]:
        memory = self._destination
        for address in runs.destination_addresses.tolist():
            region = region_at(memory, address - memory.base_address)
            offset = address - memory.base_address - region.offset_bytes
            yield rank, region.layer, offset // region.block_stride_bytes

    def _number_of(self, rank: int, runs: Runs) -> int:
        memory = self.sources[rank]
        offset = int(runs.source_addresses[0]) - memory.base_address
        region = region_at(memory, offset)
        block = (offset - region.offset_bytes) // region.block_stride_bytes
        return int(block // self.settings.chunks) + 1

    def land(self, write: Write) -> None:
        """The bytes land. I1: only blocks that their transfer still owns may be written."""
        self.writes.remove(write)
        # The memory of a crashed process has no owner.
        reached = write.session == self._destination.session
        for rank, layer, block in write.keys if reached else ():
            if self.owners.get(block) != write.transfer_id:
                raise Violation(
                    f"{write.transfer_id} wrote layer {layer} into block {block} of others"
                )
            self.landed[write.transfer_id].add((rank, layer, block))
        if write.future is not None:
            write.future.set_result(WriteResult("model", "direct", 1))

    def lose(self, write: Write) -> None:
        """The write fails, and none of its bytes land."""
        self.writes.remove(write)
        if write.future is not None:
            write.future.set_exception(TransferFailed("the model fails this write"))

    def fail_late(self, write: Write) -> None:
        """The write fails, and its bytes land as late as the transport allows."""
        future, write.future, write.late = write.future, None, True
        self.timers.call_later(QUIET_S - 0.01, self._land_late, write)
        # Set last: the callback runs at once.
        if future is not None:
            future.set_exception(TransferFailed("the model fails this write late"))

    def slow(self, write: Write) -> None:
        """The write lands at the end of its timeout."""
        write.late = True
        left_s = max(0.0, write.end_s - self.timers.time() - 0.01)
        self.timers.call_later(left_s, self._land_late, write)

    def _land_late(self, write: Write) -> None:
        if write in self.writes:
            self.land(write)

    # What may happen.

    def choices(self) -> list[Action]:
        """The possible steps; never empty before everything is over."""
        now_s = self.timers.time()
        found: list[Action] = [
            (f"turn {rank.rank}", rank.loop.turn)
            for rank in self.ranks
            if rank.loop.wait_s() <= 0.0
        ]
        for number, stream in enumerate(self.streams):
            for direction in ("to_decode", "to_prefill"):
                if stream.ready(direction):
                    deliver = partial(stream.deliver, direction)
                    found.append((f"deliver {number} {direction}", deliver))
        found += [
            (f"land {number}", partial(self.land, write))
            for number, write in enumerate(self.writes)
            if not write.late and write.future is not None
        ]
        for script in self.scripts:
            if script.steps and now_s >= script.open_s:
                found.append((f"{script.name}: {script.steps[0][0]}", script.step))
        next_s = self._next_s()
        if next_s < float("inf"):
            found.append(("wait", partial(self._wait, next_s)))
        return found

    def _next_s(self) -> float:
        now_s = self.timers.time()
        moments = [self.timers.next_s()]
        moments += [now_s + rank.loop.wait_s() for rank in self.ranks]
        moments += [
            wire.open_s
            for stream in self.streams
            for wire in (stream.to_decode, stream.to_prefill)
            if wire.messages and wire.open_s > now_s
        ]
        moments += [write.end_s for write in self.writes if not write.late]
        moments += [s.open_s for s in self.scripts if s.steps and s.open_s > now_s]
        return min(moments)

    def _wait(self, until_s: float) -> None:
        now_s = self.timers.time()
        # A sender takes a turn when its waiting time is over.
        due = [r for r in self.ranks if now_s + r.loop.wait_s() <= until_s]
        self.timers.advance_to(until_s)
        for write in [w for w in self.writes if not w.late and w.end_s <= until_s]:
            self.lose(write)
        for rank in due:
            rank.loop.turn()

    @property
    def now_s(self) -> float:
        return self.timers.time()

    def faults(self) -> list[Action]:
        return possible_faults(self)

    def mark(self) -> object:
        return fingerprint(self)

    def close(self) -> None:
        """Nothing is open."""

    @property
    def at_rest(self) -> bool:
        """Whether no step is left that matters."""
        return (
            not self.writes
            and not any(script.steps for script in self.scripts)
            and all(transfer.state is TransferState.FREE for transfer in self.transfers.values())
            and all(rank.opened == rank.reports.keys() for rank in self.ranks)
            and not any(wire.messages for s in self.streams for wire in (s.to_decode, s.to_prefill))
        )

    def crash_prefill(self) -> None:
        """The process crashes and restarts. Bytes in the kernel may land until the transport's quiet time is over."""
        self._drop_scripts("rank ")
        for rank in self.ranks:
            for write in [write for write in self.writes if write.transport is rank.transport]:
                write.future, write.late = None, True
                self.timers.call_later(QUIET_S - 0.01, self._land_late, write)
            for stream in rank.streams:
                if not stream.sender_end.over:
                    stream.sender_end.crash()
                    stream.to_decode.put(END)
        self._start_prefill()

    def crash_decode(self) -> None:
        """The process crashes, loses its memory and restarts as another incarnation. The request is tried again."""
        self.retries_left -= 1
        self._drop_scripts("decode ")
        for stream in self.streams:
            stream.vanish()
        self._start_decode()
        self.reserve()

    def _drop_scripts(self, prefix: str) -> None:
        self.scripts = [script for script in self.scripts if not script.name.startswith(prefix)]

    # The end.

    def check_rest(self) -> None:
        """Checks that nothing is held after time without faults."""
        for rank in self.ranks:
            unquiet = rank.opened - rank.reports.keys()
            if unquiet or rank.sender.active_transfers():
                raise Violation(f"rank {rank.rank} still sends {sorted(unquiet)}")
        for transfer_id, transfer in self.transfers.items():
            if transfer.state is not TransferState.FREE:
                raise Violation(f"{transfer_id} is still {transfer.state.value}")
        if self.receiver.active_count or self.receiver.quarantined_blocks or self.owners:
            raise Violation(f"blocks are still held: {self.owners}")

    def _check_bounds(self) -> None:
        """Checks that every transfer ends in time (I5)."""
        now_s = self.timers.time()
        for transfer_id, transfer in self.transfers.items():
            late = now_s > self.reserved_s[transfer_id] + BOUND_S
            if late and transfer.state is not TransferState.FREE:
                raise Violation(f"{transfer_id} is {transfer.state.value} after {BOUND_S:g} s")
