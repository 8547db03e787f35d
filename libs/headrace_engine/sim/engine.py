"""The sim engine: continuous batching with verifiable KV bytes and answers."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from headrace_common.errors import (
    DecodeFull,
    Draining,
    HeadraceError,
    InvalidRequest,
    QueueFull,
)
from headrace_common.registry.adapters import Adapter
from headrace_common.time_model.model import NO_STEPS, StepTimes
from headrace_engine.connector.pool_planner import PoolUse
from headrace_engine.connector.sender_reports import SenderReports
from headrace_engine.connector.tier_planner import TierPlanner
from headrace_engine.connector.transfers import PrefillTimes
from headrace_engine.interface import (
    AnswerSink,
    Arrived,
    DecodeTokens,
    DecodeWork,
    Engine,
    EngineUsage,
    FirstHiddenState,
    FirstToken,
    LayersArrived,
    PrefillOutcome,
    PrefillWork,
    Recompute,
    Released,
    Sampling,
    TransferEvent,
)
from headrace_engine.prefix_events import PrefixEventPublisher
from headrace_engine.sim.cache.memory import SimMemory
from headrace_engine.sim.cache.pools import CachePools
from headrace_engine.sim.model.model import SimModel
from headrace_engine.sim.model.sampling import HIDDEN_FORMAT, check
from headrace_engine.sim.model.settings import plan_shape
from headrace_engine.sim.ranks import Ranks, layer_groups
from headrace_engine.sim.scheduler import Scheduler
from headrace_engine.sim.sequence import Answer, Prompt, Sequence
from headrace_engine.sim.stepper import SimClock, Stepper
from headrace_engine.steps import EngineSteps, StepWatch
from headrace_kv.layout import KvDescriptor, RankMemory
from headrace_kv.messages import SendReport
from headrace_kv.prefix.events import Tier
from headrace_kv.receive.local_broadcast import LocalBroadcast
from headrace_kv.send.sender import RankSender
from headrace_kv.send.stream import SenderContext
from headrace_kv.tiers.copier import TierCopier, block_bytes_of
from headrace_kv.tiers.load_times import LoadTimes
from headrace_kv.tiers.pool import BlockLookup, PoolKeys, PoolOpener, pool_opener, pool_secret
from headrace_kv.tiers.promises import KeepTerms, Kept, PromiseCounts
from headrace_kv.tiers.tiers import LowerTiers
from headrace_kv.transport.factory import TransportUse, open_transport
from headrace_kv.transport.memory import HOST_MEMORY

if TYPE_CHECKING:
    from headrace_common.process.kill_timer import KillTimer
    from headrace_engine.config import EngineConfig
    from headrace_kv.send.sender import SenderThread
    from headrace_kv.send.stream import DescriptorSource
    from headrace_kv.transport.base import KvTransport
    from headrace_kv.transport.guard import Networks

Argument = TypeVar("Argument")
Work = TypeVar("Work", PrefillWork, DecodeWork)

_logger = logging.getLogger(__name__)
_SENDERS_CLOSE_S = 40.0


class SimEngine(Engine):
    """Runs in the caller's process: one task, and a sender thread for each rank that sends.

    Engines may share one `sender_thread` and one `kill_timer`, see SenderContext. For tests:
    `transports` opens one transport per rank, and `clock` gives the time of computing.
    """

    def __init__(
        self,
        config: EngineConfig,
        descriptors: DescriptorSource,
        *,
        transports: Callable[[], TransportUse] | None = None,
        pools: PoolOpener | None = None,
        clock: SimClock | None = None,
        sender_thread: SenderThread | None = None,
        kill_timer: KillTimer | None = None,
    ) -> None:
        """Raises ConfigError naming the wrong field."""
        self._config = config
        self._descriptors = descriptors
        self._open_transport = transports or (lambda: TransportUse.sole(open_transport_of(config)))
        self._open_remote_pool = pools or pool_opener(
            config.tiers, config.host, config.rdma_devices, config.admitted
        )
        self._sender_thread = sender_thread
        self._kill_timer = kill_timer
        self._shape = plan_shape(config)
        self._clock = clock or SimClock()
        self.model = SimModel(self._shape.settings)
        self.hidden_format = HIDDEN_FORMAT
        self.adapters = self._shape.settings.adapters
        self._random = random.Random(config.seed)
        self.steps = StepWatch(config.step_stall_s, read=self._read_steps)
        self.tier_loads = LoadTimes()
        self._transports: list[TransportUse] = []
        self._senders: list[RankSender] = []
        self._scheduler: Scheduler | None = None
        self._outgoing: dict[str, SenderReports] = {}
        self._copiers: list[TierCopier] = []
        self._host_memories: list[RankMemory] = []
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        shape, config = self._shape, self._config
        self._memory = SimMemory(self.model, shape, hash(config.ref))
        local = config.role == "decode" and config.local_broadcast
        layout = self._memory.layout(shape.tensor_parallel_size if local else 1)
        ranks = []
        for rank in range(layout.rank_count):
            self._transports.append(await asyncio.to_thread(self._open_transport))
            transport = self._transports[rank].transport
            await asyncio.to_thread(
                transport.register, self._memory.address(rank), self._memory.arena_bytes(rank)
            )
            ranks.append(self._memory.rank_memory(rank, transport.name, transport.session))
        self.descriptor = KvDescriptor(layout, tuple(ranks))
        self.landed_memories = {one.rank: HOST_MEMORY for one in ranks}
        self._open_cache()
        if config.role == "prefill":
            self._host_memories = [copier.host_memory for copier in self._copiers]
            for use, memory in zip(self._transports, self._host_memories, strict=False):
                await asyncio.to_thread(
                    use.transport.register, memory.base_address, memory.arena_bytes
                )
        loop = asyncio.get_running_loop()
        self._ranks = Ranks(layout, lambda report: _call_soon(loop, self._rank_quiet, report))
        self._ranks.open_tiers(
            self._copiers, lambda load: _call_soon(loop, self.tier_loaded, load), self._waker()
        )
        self._stepper = Stepper(
            self.model, self._memory, self._pools, self._ranks, shape.settings, self._clock
        )
        self.broadcast = LocalBroadcast(self.descriptor) if layout.broadcast_width > 1 else None
        self.computes_beside = layout.keeps_all_tokens and not config.tiers.names
        self.max_model_len = shape.max_model_len
        self.vocabulary_size = self.model.vocabulary
        if config.sends:
            self._open_senders()
        self._scheduler = Scheduler(
            layer_groups(layout),
            shape,
            self._pools,
            self._ranks,
            self._stepper,
            self._clock,
        )
        self._task = asyncio.create_task(self._scheduler.run(), name=f"sim engine {config.ref}")

    def _open_cache(self) -> None:
        layout, tiers = self.descriptor.layout, self._config.tiers
        counts: Mapping[Tier, int] = {}
        if tiers.names:
            counts = tiers.block_counts(block_bytes_of(layout, 0, pooled=tiers.pooled))
            self._copiers = [
                TierCopier(layout, memory, counts, tiers.disk_folder, pooled=tiers.pooled)
                for memory in self.descriptor.ranks
            ]
        planner = TierPlanner(
            LowerTiers(counts),
            layout.block_tokens,
            PoolUse(layout.rank_count, tiers.publishes, tiers.pool_timeout_s),
            sends_from_host=self._config.role == "prefill",
        )
        self.prefix_events = PrefixEventPublisher(
            self._config.ref, layout.block_tokens, tiers=tiers.announced
        )
        self._pools = CachePools(
            layout.groups,
            self._shape.block_counts,
            self._memory.fill_guard,
            self.prefix_events,
            planner,
        )
        if counts and tiers.pooled:
            self.prefix_events.on_hash_key(self._open_pool)

    def _open_pool(self, prefix_hash_key: int) -> None:
        """The pool's names and seals need the deployment's key."""
        secret, planner = pool_secret(prefix_hash_key), self._pools.tiers.pool
        memories = [copier.pool_memory for copier in self._copiers]
        wake = self._waker()

        def lost() -> None:
            planner.lost()
            wake()

        pool = self._open_remote_pool(memories, secret, lost)
        keys = PoolKeys(secret, self.descriptor.layout)
        self._ranks.attach_pool(pool, keys)
        planner.attach(BlockLookup(pool, keys, wake))

    def _waker(self) -> Callable[[], None]:
        """Wakes the step loop from any thread."""
        loop = asyncio.get_running_loop()
        return lambda: _call_soon(loop, lambda _: self._requests.wake(), None)

    def _open_senders(self) -> None:
        """The senders of all ranks. A decode engine opens them with its first prefix to send."""
        if not self._senders:
            self._senders = self._ranks.start_sending(self._new_sender)

    def _new_sender(self, rank: int, on_quiet: Callable[[SendReport], None]) -> RankSender:
        context = SenderContext(
            ref=self._config.ref,
            rank=rank,
            layout=self.descriptor.layout,
            memory=self.descriptor.ranks[rank],
            transport=self._transports[rank].transport,
            descriptors=self._descriptors,
            event_loop=asyncio.get_running_loop(),
            on_quiet=on_quiet,
            credentials=self._config.credentials,
            kill_timer=self._kill_timer,
            host_memory=self._host_memories[rank] if self._host_memories else None,
            hidden_format=self.hidden_format,
        )
        return RankSender(context, thread=self._sender_thread)

    async def admit_transfer_peers(self, networks: Networks) -> None:
        for use in self._transports:
            await asyncio.to_thread(use.admit, networks)

    async def prefill(
        self,
        work: PrefillWork,
        on_first_token: Callable[[DecodeTokens], None] | None = None,
        on_report: Callable[[SendReport], None] | None = None,
    ) -> PrefillOutcome:
        check(work, self.max_model_len)
        self.require_adapter(work.adapter)
        self._open_senders()
        outgoing = SenderReports(work.target, len(self._ranks), self._ranks.stop)
        work = self._seeded(work, work.sampling)
        block_tokens = self._shape.block_tokens
        sequence = Prompt(work, outgoing, on_first_token, self.model, block_tokens)
        self._requests.submit(sequence, QueueFull)
        self._outgoing[outgoing.transfer_id] = outgoing
        costs = self._requests.meter.costs
        try:
            await outgoing.wait()
            cost = costs.bill(outgoing.transfer_id)
        finally:
            costs.drop(outgoing.transfer_id)
            del self._outgoing[outgoing.transfer_id]
            sequence.close()
            self._requests.update(sequence)
            for report in outgoing.reports:
                if on_report is not None:
                    on_report(report)
        now_ns = time.time_ns()
        # All of it may have been sent from main memory before it was loaded.
        times = sequence.times or PrefillTimes(sequence.cached, now_ns, now_ns)
        return PrefillOutcome(
            cached_tokens=times.cached_tokens,
            compute_start_unix_ns=times.compute_start_unix_ns,
            compute_end_unix_ns=times.compute_end_unix_ns,
            reports=outgoing.reports,
            fetched_tokens=times.fetched_tokens,
            tier_tokens=sequence.tier_tokens,
            cost=cost,
        )

    async def decode(self, work: DecodeWork, sink: AnswerSink) -> None:
        check(work, self.max_model_len)
        self.require_adapter(work.adapter)

        def keep(answer: Sequence) -> Kept | None:
            tiers, terms = self._pools.tiers, work.keep
            return tiers.keep(answer.transfer_id, answer.computed, terms) if terms else None

        sequence = Answer(
            self._seeded(work, work.sampling),
            self.model,
            self.max_model_len,
            self._shape.block_tokens,
            keep,
            self._requests.meter.costs.bill,
            sink,
        )
        self._requests.submit(sequence, DecodeFull)
        try:
            await sequence.answered
        finally:
            sequence.close()
            self._requests.update(sequence)
            cost = self._requests.meter.costs.bill(work.transfer_id)
            if cost.prefill_s or cost.decode_s:
                sink.put(cost)

    @property
    def promises(self) -> PromiseCounts:
        return self._pools.tiers.promises.counts()

    async def keep(self, terms: KeepTerms) -> Kept | None:
        return self._pools.tiers.promises.renew(terms) if self._copiers else None

    async def load_adapter(self, name: str, folder: Path, *, is_3d_lora_weight: bool) -> Adapter:
        try:
            data = (folder / "adapter_config.json").read_bytes()
        except OSError as error:
            raise InvalidRequest({"path": f"{folder} is no adapter: {error.strerror}"}) from error
        adapter = Adapter(name, hashlib.sha256(data).hexdigest()[:16])
        self.adapters = tuple({*self.adapters, adapter})
        return adapter

    def _seeded(self, work: Work, sampling: Sampling | None) -> Work:
        if sampling is None or sampling.seed is not None or not sampling.temperature > 0:
            return work
        return replace(work, sampling=replace(sampling, seed=self._random.getrandbits(63)))

    def transfer_event(self, event: TransferEvent) -> None:
        planner = self._requests.planner
        match event:
            case Arrived(transfer_id):
                planner.transfer_settled(transfer_id, whole=True)
            case Released(transfer_id):
                planner.transfer_settled(transfer_id, whole=False)
            case Recompute(transfer_id):
                planner.transfer_late(transfer_id)
            case FirstToken(transfer_id, token_id):
                planner.first_token_received(transfer_id, token_id)
            case FirstHiddenState(transfer_id, state):
                self._first_hidden_state(transfer_id, state)
            case LayersArrived(transfer_id, layer_count):
                self._ranks.arrivals.arrived(transfer_id, layer_count)
                self._stepper.layers_arrived.set()
                planner.layers_arrived(transfer_id)
        self._requests.wake()

    def _first_hidden_state(self, transfer_id: str, state: bytes) -> None:
        sequence = self._requests.find(transfer_id)
        if not isinstance(sequence, Answer) or sequence.ended or not sequence.awaits_first_token:
            return
        try:
            token_id = self._stepper.generate_from_hidden_state(sequence, state)
        except HeadraceError as exc:
            sequence.fail(exc)
        else:
            self._requests.planner.first_token_received(transfer_id, token_id)
        self._requests.update(sequence)

    @property
    def _requests(self) -> Scheduler:
        if self._scheduler is None:
            raise Draining("the engine is not running")
        return self._scheduler

    @property
    def step_times(self) -> StepTimes:
        return NO_STEPS if self._scheduler is None else self._scheduler.meter.times

    def _read_steps(self) -> EngineSteps:
        return EngineSteps() if self._scheduler is None else self._scheduler.meter.steps

    def usage(self) -> EngineUsage:
        requests = self._requests
        return EngineUsage(requests.running_count, requests.waiting_count, self._pools.held_count)

    async def reset_prefix_cache(self) -> bool:
        if not self._pools.reset_cache():
            return False
        self.prefix_events.cleared()
        return True

    async def close(self) -> None:
        if self._scheduler is not None:
            self._scheduler.begin_close()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._scheduler is not None:
            self._scheduler.end_close()
        if self.broadcast is not None:
            await asyncio.to_thread(self.broadcast.close)
        for sender in self._senders:
            sender.close()
        if self._senders:
            ends = [asyncio.wrap_future(sender.closed) for sender in self._senders]
            _, late = await asyncio.wait(ends, timeout=_SENDERS_CLOSE_S)
            if late:
                _logger.warning("%d senders of %s still write", len(late), self._config.ref)
        await asyncio.gather(*(asyncio.to_thread(one.close) for one in self._transports))
        await asyncio.to_thread(self._ranks.close)
        self._senders, self._transports = [], []

    def _rank_quiet(self, report: SendReport) -> None:
        outgoing = self._outgoing.get(report.transfer_id)
        if outgoing is not None:
            outgoing.rank_quiet(report)
        self._requests.wake()


def open_transport_of(config: EngineConfig) -> KvTransport:
    """The transport that `config` describes. Raises ConfigError."""
    return open_transport(
        config.transport,
        config.host,
        rdma_devices=config.rdma_devices,
        admitted=config.admitted,
        quiet_s=config.write_quiet_s,
    )


def _call_soon(
    loop: asyncio.AbstractEventLoop, call: Callable[[Argument], None], argument: Argument
) -> None:
    # A closed loop has no task that waits for the call.
    if not loop.is_closed():
        loop.call_soon_threadsafe(call, argument)
