"""The sim engine: admission, the step loop, and the ends of requests."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from headrace_common.errors import (
    DecodeFull,
    Draining,
    DuplicateTransfer,
    HeadraceError,
    InternalError,
    InvalidRequest,
    QueueFull,
    TransferFailed,
)
from headrace_engine.interface import (
    DecodeEnded,
    DecodeEvent,
    DecodeTokens,
    DecodeWork,
    Engine,
    EngineUsage,
    PrefillOutcome,
    PrefillWork,
    Sampling,
)
from headrace_engine.prefix.announcer import PrefixAnnouncer
from headrace_engine.sim.cache.host_tier import open_host_tier
from headrace_engine.sim.cache.memory import SimMemory
from headrace_engine.sim.cache.pools import CachePools
from headrace_engine.sim.faults import SimFaults
from headrace_engine.sim.model.logits import logits_bytes
from headrace_engine.sim.model.model import SimModel
from headrace_engine.sim.model.settings import plan_shape
from headrace_engine.sim.request.handover import Handover
from headrace_engine.sim.request.sequence import (
    FirstToken,
    Sequence,
    decode_sequence,
    prefill_sequence,
)
from headrace_engine.sim.step.schedule import plan_step
from headrace_engine.sim.step.stepper import Stepper
from headrace_kv.handoff.messages import Reservation, SendReport
from headrace_kv.layout.layout import KvDescriptor
from headrace_kv.prefix.events import Tier
from headrace_kv.receive.local_broadcast import LocalBroadcast
from headrace_kv.send.context import SenderContext
from headrace_kv.send.sender import RankSender
from headrace_kv.transport.factory import open_transport
from headrace_kv.transport.memory import HOST_MEMORY

if TYPE_CHECKING:
    from headrace_engine.config import EngineConfig
    from headrace_kv.send.context import DescriptorSource
    from headrace_kv.send.thread import SenderThread
    from headrace_kv.transport.base import KvTransport

_logger = logging.getLogger(__name__)
_SENDERS_END_S = 40.0
_WAITING_PER_RUNNING = 4
_WAITING_LEAST = 64


class SimEngine(Engine):
    """Runs in the caller's process: one task, and one thread per rank of a prefill engine for its
    sender, unless `sender_thread` is given, which engines may share.

    `transports` opens one transport per rank; `faults` and it are for tests.
    """

    landed_memory = HOST_MEMORY

    def __init__(
        self,
        config: EngineConfig,
        descriptors: DescriptorSource,
        *,
        faults: SimFaults | None = None,
        transports: Callable[[], KvTransport] | None = None,
        sender_thread: SenderThread | None = None,
    ) -> None:
        """Raises ConfigError naming the wrong field."""
        self._config = config
        self._descriptors = descriptors
        self._faults = faults or SimFaults()
        self._open_transport = transports or (lambda: open_transport(config.transport, config.host))
        self._sender_thread = sender_thread
        self._shape = plan_shape(config)
        self.model = SimModel(self._shape.settings)
        self.logits_bytes = logits_bytes(self.model.vocabulary)
        self._random = random.Random(config.seed)
        self._waiting: deque[Sequence] = deque()
        self._running: deque[Sequence] = deque()
        self._active: dict[str, Sequence] = {}
        self._transports: list[KvTransport] = []
        self._senders: list[RankSender] = []
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closing = False

    async def start(self) -> None:
        shape, config = self._shape, self._config
        self._memory = SimMemory(self.model, shape, hash(config.ref))
        local = config.role == "decode" and config.local_broadcast
        layout = self._memory.layout(shape.tensor_parallel_size if local else 1)
        host = open_host_tier(shape.settings.host_blocks, self._memory)
        tiers = (Tier.DEVICE,) if host is None else (Tier.DEVICE, Tier.HOST)
        self.prefix_events = PrefixAnnouncer(config.ref, layout.block_tokens, tiers=tiers)
        self._pools = CachePools(
            layout.groups, shape.block_counts, self._memory.fill_guard, self.prefix_events, host
        )
        self._stepper = Stepper(self.model, self._memory, self._pools, shape, self._faults)
        ranks = []
        for rank in range(layout.rank_count):
            transport = await asyncio.to_thread(self._open_transport)
            self._transports.append(transport)
            await asyncio.to_thread(
                transport.register, self._memory.address(rank), self._memory.arena_bytes(rank)
            )
            ranks.append(self._memory.rank_memory(rank, transport.name, transport.session))
        self.descriptor = KvDescriptor(layout, tuple(ranks))
        self.broadcast = LocalBroadcast(self.descriptor) if local else None
        self.max_model_len = shape.max_model_len
        if config.role == "prefill":
            self._senders = [self._new_sender(rank) for rank in range(len(ranks))]
        self._task = asyncio.create_task(self._run(), name=f"sim engine {config.ref}")

    def _new_sender(self, rank: int) -> RankSender:
        loop = asyncio.get_running_loop()
        context = SenderContext(
            ref=self._config.ref,
            rank=rank,
            layout=self.descriptor.layout,
            memory=self.descriptor.ranks[rank],
            transport=self._transports[rank],
            descriptors=self._descriptors,
            event_loop=loop,
            on_quiet=lambda report: _call_soon(loop, self._report, report),
            tls=self._config.tls,
        )
        return RankSender(context, thread=self._sender_thread)

    async def prefill(
        self, work: PrefillWork, on_first_token: Callable[[DecodeTokens], None] | None = None
    ) -> PrefillOutcome:
        self._check_prefill(work)
        handover = Handover(work.target, self._senders, self.descriptor.layout)
        first_token = None
        if work.sampling is not None and on_first_token is not None:
            first_token = FirstToken(self._seeded(work.sampling), on_first_token)
        sequence = prefill_sequence(work, self.model, handover, first_token)
        self._enqueue(sequence, QueueFull)
        try:
            try:
                handover.open()
            except HeadraceError as exc:
                handover.fail(exc)
            await handover.run()
        finally:
            sequence.ended = True
            self._settle(sequence)
        return PrefillOutcome(
            cached_tokens=sequence.cached,
            compute_start_unix_ns=sequence.compute_start_unix_ns,
            compute_end_unix_ns=sequence.compute_end_unix_ns,
            layers=handover.layers_sent(),
            control_bytes=handover.control_bytes,
        )

    def _check_prefill(self, work: PrefillWork) -> None:
        target, count = work.target, len(work.token_ids)
        violations = {}
        if not 0 < count < self.max_model_len:
            violations["token_ids"] = f"give 1 to {self.max_model_len - 1} tokens"
        if not 0 <= target.start_token < target.end_token == count:
            violations["target.end_token"] = "it is the number of tokens, beyond start_token"
        if violations:
            raise InvalidRequest(violations)
        if not self._senders:
            raise InternalError("this engine was not started for prefill")

    async def decode(self, work: DecodeWork) -> AsyncIterator[DecodeEvent]:
        sequence = self._enter_decode(work)
        assert sequence.generation is not None
        try:
            while True:
                for event in await sequence.generation.mailbox.take():
                    yield event
                    if isinstance(event, DecodeEnded):
                        return
        finally:
            sequence.ended = True
            # Nobody can announce the end of a reservation that nobody has seen.
            if sequence.generation.mailbox.has_reservation:
                sequence.receiving = False
            self._settle(sequence)

    def _enter_decode(self, work: DecodeWork) -> Sequence:
        if not 0 < len(work.token_ids) < self.max_model_len:
            raise InvalidRequest({"token_ids": f"give 1 to {self.max_model_len - 1} tokens"})
        if work.sampling.max_tokens <= work.generated_tokens:
            least = work.generated_tokens + 1
            raise InvalidRequest({"sampling.max_tokens": f"take {least} or more"})
        sampling = self._seeded(work.sampling)
        sequence = decode_sequence(work, sampling, self.model, self.max_model_len)
        self._enqueue(sequence, DecodeFull)
        return sequence

    def _seeded(self, sampling: Sampling) -> Sampling:
        if sampling.temperature > 0 and sampling.seed is None:
            return replace(sampling, seed=self._random.getrandbits(63))
        return sampling

    def _enqueue(self, sequence: Sequence, full: type[HeadraceError]) -> None:
        if self._closing or self._task is None:
            raise Draining("the engine is not running")
        if sequence.transfer_id in self._active:
            raise DuplicateTransfer(
                f"transfer {sequence.transfer_id} is already being worked on",
                metadata={"transfer_id": sequence.transfer_id},
            )
        if len(self._waiting) >= max(
            _WAITING_LEAST, _WAITING_PER_RUNNING * self._shape.max_num_seqs
        ):
            raise full(f"{len(self._waiting)} requests are waiting already")
        self._active[sequence.transfer_id] = sequence
        self._waiting.append(sequence)
        self._wake.set()

    def arrived(self, transfer_id: str) -> None:
        sequence = self._receiving(transfer_id)
        if sequence is None:
            return
        sequence.receiving = False
        assert sequence.generation is not None
        end = sequence.generation.transferable_tokens
        self._corrupt(sequence)
        self._pools.publish(sequence, sequence.computed, end)
        sequence.computed = end
        self._settle(sequence)
        self._wake.set()

    def first_token(self, transfer_id: str, token_id: int) -> None:
        sequence = self._active.get(transfer_id)
        generation = sequence.generation if sequence is not None else None
        if sequence is not None and generation is not None and generation.awaits_first_token:
            generation.awaits_first_token = False
            sequence.append(token_id, self.model)
            self._wake.set()

    def first_logits(self, transfer_id: str, logits: bytes) -> None:
        sequence = self._active.get(transfer_id)
        generation = sequence.generation if sequence is not None else None
        if sequence is None or generation is None or sequence.ended:
            return
        if generation.awaits_first_token:
            generation.awaits_first_token = False
            try:
                self._stepper.say_first(sequence, generation, logits)
            except HeadraceError as exc:
                self._fail(sequence, exc)
            self._wake.set()

    def released(self, transfer_id: str) -> None:
        sequence = self._receiving(transfer_id)
        if sequence is None:
            return
        sequence.receiving = False
        self._fail(sequence, TransferFailed("the KV cache did not arrive"))

    def _receiving(self, transfer_id: str) -> Sequence | None:
        """The request that waits for this transfer; None for one that is over, which may be told
        late.
        """
        sequence = self._active.get(transfer_id)
        return sequence if sequence is not None and sequence.receiving else None

    def _corrupt(self, sequence: Sequence) -> None:
        fault = self._faults.corrupt
        if fault is None:
            return
        index = self.descriptor.layout.group_index(fault.layer)
        size = max(1, self.descriptor.layout.groups[index].block_tokens)
        block, token = divmod(fault.token, size)
        self._memory.invert_byte(
            fault.rank,
            fault.layer,
            fault.part,
            sequence.block_ids_by_group[index][block],
            fault.head,
            token,
            fault.byte,
        )

    def usage(self) -> EngineUsage:
        return EngineUsage(len(self._running), len(self._waiting), self._pools.held_count)

    async def reset_prefix_cache(self) -> bool:
        if not self._pools.forget():
            return False
        if self.prefix_events is not None:
            self.prefix_events.cleared()
        return True

    def free_block_count(self) -> int:
        """Blocks of all groups that no request holds; those that keep a prefix for later count as
        free.
        """
        return self._pools.available_count

    def guard_violations(self) -> tuple[tuple[int, int], ...]:
        """Empty blocks, as (group, block), that somebody wrote to: always none, unless I1 was
        broken.
        """
        return tuple(
            (group, block)
            for group, free in enumerate(self._pools.free_ids_by_group())
            for block in self._memory.guard_violations(group, free)
        )

    async def close(self) -> None:
        self._closing = True
        for sequence in tuple(self._active.values()):
            self._fail(sequence, Draining("the engine is closing"))
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for sequence in tuple(self._active.values()):
            self._settle(sequence)
        if self.broadcast is not None:
            await asyncio.to_thread(self.broadcast.close)
        for sender in self._senders:
            sender.close()
        if self._senders:
            ends = [asyncio.wrap_future(sender.closed) for sender in self._senders]
            _, late = await asyncio.wait(ends, timeout=_SENDERS_END_S)
            if late:
                _logger.warning("%d senders of %s still write", len(late), self._config.ref)
        await asyncio.gather(*(asyncio.to_thread(one.close) for one in self._transports))
        self._senders, self._transports = [], []

    async def _run(self) -> None:
        while True:
            try:
                if not await self._turn():
                    self._wake.clear()
                    await self._wake.wait()
            except Exception:
                _logger.exception("a step of the sim engine failed")
                for sequence in tuple(self._active.values()):
                    self._fail(sequence, InternalError("a step of the sim engine failed"))
            await asyncio.sleep(0)

    async def _turn(self) -> bool:
        """Admits and computes; False when there is nothing to do."""
        self._admit()
        ready = [sequence for sequence in self._running if sequence.is_ready]
        shape = self._shape
        chunks = plan_step(ready, shape.max_num_batched_tokens, shape.span_tokens)
        if not chunks:
            return False
        for chunk in chunks:
            if not chunk.sequence.chunk_count:
                chunk.sequence.compute_start_unix_ns = time.time_ns()
        try:
            await self._stepper.run(chunks)
        except InternalError as exc:
            for chunk in chunks:
                self._fail(chunk.sequence, exc)
        for chunk in chunks:
            self._settle(chunk.sequence)
        self._running.rotate(-1)
        return True

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._shape.max_num_seqs:
            sequence = self._waiting[0]
            if not self._pools.place(sequence):
                return
            self._waiting.popleft()
            self._running.append(sequence)
            copy_s = sequence.copied * self._shape.settings.host_copy_s_per_token
            if copy_s:
                sequence.copying = True
                asyncio.get_running_loop().call_later(copy_s, self._end_copying, sequence)
            elif sequence.handover is not None:
                self._stepper.push_cached(sequence)
            if sequence.generation is not None and sequence.generation.remote_kv:
                self._reserve(sequence)

    def _end_copying(self, sequence: Sequence) -> None:
        """What came from main memory may be used now."""
        sequence.copying = False
        if sequence.handover is not None and sequence.is_ready:
            self._stepper.push_cached(sequence)
        self._wake.set()

    def _reserve(self, sequence: Sequence) -> None:
        assert sequence.generation is not None
        start, end = sequence.cached, sequence.generation.transferable_tokens
        first, *further = self._pools.blocks_between(sequence, start, end)
        sequence.generation.mailbox.put_reservation(
            Reservation(sequence.transfer_id, first, start, end, tuple(further))
        )
        sequence.receiving = start < end

    def _report(self, report: SendReport) -> None:
        sequence = self._active.get(report.transfer_id)
        if sequence is not None and sequence.handover is not None:
            sequence.handover.report(report)
            self._settle(sequence)

    def _fail(self, sequence: Sequence, failure: HeadraceError) -> None:
        if sequence.handover is not None:
            sequence.handover.fail(failure)
        if sequence.generation is not None and not sequence.ended:
            sequence.generation.mailbox.put_failure(failure)
            sequence.ended = True
        self._settle(sequence)

    def _settle(self, sequence: Sequence) -> None:
        """Gives an ended sequence's blocks back, unless somebody still reads or writes them."""
        if not sequence.ended or sequence.in_step or sequence.receiving:
            return
        if sequence.handover is not None and not sequence.handover.quiet.is_set():
            return
        if self._active.get(sequence.transfer_id) is not sequence:
            return
        del self._active[sequence.transfer_id]
        for queue in (self._waiting, self._running):
            if sequence in queue:
                queue.remove(sequence)
        self._pools.release(sequence)
        self._wake.set()


def _call_soon(
    loop: asyncio.AbstractEventLoop, call: Callable[[SendReport], None], report: SendReport
) -> None:
    # A loop that is gone has nobody left who waits for the report.
    if not loop.is_closed():
        loop.call_soon_threadsafe(call, report)
