"""The worker's half of the connector, one per rank: its memory, transport, sender and link."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.engine.v1 import link_pb2
from headrace_common.errors import ConfigError, HeadraceError
from headrace_common.process.kill_timer import KillTimer
from headrace_engine.connector.layer_arrivals import LayerArrivals
from headrace_engine.connector.layer_groups import LayerGroup
from headrace_engine.connector.step_executor import StepExecutor, layer_kinds
from headrace_engine.connector.step_plan import BlockComparison, StepPlan
from headrace_engine.connector.tier_executor import PoolExecutor, TierExecutor
from headrace_engine.torch_memory.device_memory import (
    open_tensor_transport,
    open_tier_memory,
    register_host,
)
from headrace_engine.torch_memory.stream_order import DeviceOrder
from headrace_engine.vllm.compat import (
    block_interior,
    hidden_format,
    request_tile_registers,
    tensor_parallel_rank,
    tensor_parallel_size,
)
from headrace_engine.vllm.link.client import EngineLink
from headrace_engine.vllm.link.messages import report_to_proto, tier_load_to_proto
from headrace_engine.vllm.parallel import (
    gather_from_stages,
    node_rank,
    stage_of_this_rank,
    value_of_first_rank,
)
from headrace_engine.vllm.rank.comparison import BlockComparer
from headrace_engine.vllm.rank.hidden_states import listen, sample_beside_steps
from headrace_engine.vllm.rank.memory import (
    Arena,
    describe_arena,
    join_stages,
    rank_memory,
)
from headrace_engine.vllm.settings import ConnectorSettings
from headrace_kv.hidden_state import hidden_state_rank
from headrace_kv.layout import (
    KvLayout,
    RankMemory,
    layout_from_proto,
    layout_to_proto,
    rank_memory_to_proto,
)
from headrace_kv.send.sender import RankSender
from headrace_kv.send.stream import SenderContext
from headrace_kv.shard_map import heads_held
from headrace_kv.tiers.copier import TierCopier
from headrace_kv.tiers.pool import PoolKeys, pool_secret
from headrace_kv.transport.base import KvTransport
from headrace_kv.transport.guard import parse_networks
from headrace_kv.transport.mapped_memory import share_pages

if TYPE_CHECKING:
    from torch import Tensor
    from vllm.config import VllmConfig

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0


class ConnectorWorker:
    """Its public methods are hooks of vLLM's KVConnectorBase_V1. The rank's compute thread calls them.

    vLLM makes it before there is KV memory, and calls `register_kv_caches` once before the first step.
    """

    def __init__(
        self, settings: ConnectorSettings, vllm_config: VllmConfig, groups: tuple[LayerGroup, ...]
    ) -> None:
        request_tile_registers()
        self._settings = settings
        self._vllm_config = vllm_config
        self._groups = groups
        # On another host than the service.
        self._is_remote = node_rank(vllm_config) > 0
        self._stage, self._rank_in_stage = stage_of_this_rank(), tensor_parallel_rank()
        self._stage_ranks = tensor_parallel_size(vllm_config)
        self._rank = self._stage * self._stage_ranks + self._rank_in_stage
        # Numbers in the stage until `register_kv_caches`, then in the layout.
        self._layer_numbers = {name: number for group in groups for number, name in group.layers}
        self._transport: KvTransport | None = None
        self._sender: RankSender | None = None
        # Of a decode rank, until it sends its first prefix.
        self._start_sending_later: Callable[[], None] | None = None
        self._link: EngineLink | None = None
        self._executor = StepExecutor(
            self._rank, lambda report: self._send(report=report_to_proto(report))
        )
        self.arrivals = LayerArrivals()
        self._comparer: BlockComparer | None = None
        self._comparisons: Sequence[BlockComparison] = ()
        self._tiers: TierExecutor | None = None
        self._copier: TierCopier | None = None
        self._pool: PoolExecutor | None = None
        if settings.tiers.pooled:
            self._pool = PoolExecutor(self._rank)
        # One thread, which keeps the order of the updates.
        self._admissions = ThreadPoolExecutor(1, "kv-admit")
        self._samples = ThreadPoolExecutor(1, "first-token")
        self._sums = ThreadPoolExecutor(1, "word-sums")
        self._fence: Callable[[], None] = lambda: None

    def register_kv_caches(self, kv_caches: Mapping[str, Tensor]) -> None:
        """Registers the memory with the transport and attaches to the service. Raises ConfigError."""
        settings, tensor = self._join_engine(), next(iter(kv_caches.values()))
        arena, layout = self._describe(kv_caches)
        if settings.role != "prefill":
            self._comparer = self._open_comparer(kv_caches)
        # It moves pages, which the transport registers where they are.
        memory_descriptor = self._share(arena, tensor)
        self._transport, order = open_tensor_transport(
            tensor,
            settings.transport,
            settings.host,
            gpu_direct=settings.gpu_direct,
            rdma_devices=settings.rdma_devices,
            admitted=None if settings.admitted is None else parse_networks(settings.admitted),
            quiet_s=settings.write_quiet_s,
        )
        self._fence = order.fence
        memory = rank_memory(
            arena,
            rank=self._rank,
            transport=self._transport.name,
            session=self._transport.session,
        )
        if settings.tiers.names:
            self._open_tiers(layout, memory, tensor, order)
        attachment = link_pb2.Attachment(
            rank=self._rank,
            layout=layout_to_proto(layout),
            memory=rank_memory_to_proto(memory),
            process_id=os.getpid() if memory_descriptor else 0,
            memory_descriptor=memory_descriptor,
        )
        address = settings.link_address if self._is_remote else ""
        path, secret = Path(settings.link_path), settings.link_secret
        self._link = EngineLink(path, attachment, self._on_response, address, secret)
        start_sending = partial(
            self._start_sending, self._link, self._transport, order, layout, memory
        )
        if settings.role == "decode":
            self._executor.start(order.fence)
            self._start_sending_later = start_sending
        else:
            start_sending()

    def _join_engine(self) -> ConnectorSettings:
        """On another host than the service, the worker's identity and the link's secret are those of rank 0."""
        own = self._settings
        first = own.worker_id, own.incarnation, own.link_secret
        worker_id, incarnation, secret = value_of_first_rank(self._vllm_config, first)
        self._settings = replace(
            own, worker_id=worker_id, incarnation=incarnation, link_secret=secret
        )
        return self._settings

    def _describe(self, kv_caches: Mapping[str, Tensor]) -> tuple[Arena, KvLayout]:
        """The rank's memory and the worker's layout, with all stages. Numbers the layers as the layout does."""
        arena = describe_arena(
            kv_caches,
            self._groups,
            rank=self._rank_in_stage,
            tensor_parallel_size=self._stage_ranks,
            block_format_of=block_interior(self._vllm_config),
        )
        stages = join_stages(gather_from_stages(arena.groups))
        first = stages.stage_starts[self._stage]
        self._layer_numbers = {name: first + number for name, number in self._layer_numbers.items()}
        layout = KvLayout(
            self._settings.fingerprint, self._stage_ranks, stages.groups, stages.stage_starts
        )
        return stages.in_model(arena, self._stage), layout

    def _open_comparer(self, kv_caches: Mapping[str, Tensor]) -> BlockComparer:
        group = self._groups[0]
        heads = heads_held(self._rank_in_stage, self._stage_ranks, group.head_count)
        layers = [(self._layer_numbers[name], name) for _, name in group.layers]
        cache_dtype = str(self._vllm_config.cache_config.cache_dtype)
        return BlockComparer(kv_caches, layers, heads.start, cache_dtype)

    def _share(self, arena: Arena, tensor: Tensor) -> int:
        """The descriptor with which the service maps what decode receives, 0 where it does not."""
        if self._settings.role == "prefill" or tensor.device.type != "cpu" or self._is_remote:
            return 0
        try:
            return share_pages(arena.base_address, arena.arena_bytes)
        except ConfigError as error:
            log.info("rank %d shares nothing with the service: %s", self._rank, error.detail)
            return 0

    def _open_tiers(
        self, layout: KvLayout, memory: RankMemory, tensor: Tensor, order: DeviceOrder
    ) -> None:
        """Raises ConfigError."""
        (group,) = self._groups
        tiers = self._settings.tiers
        self._copier = TierCopier(
            layout,
            memory,
            tiers.block_counts(group.block_bytes),
            tiers.disk_folder,
            pooled=tiers.pooled,
            device_memory=open_tier_memory(tensor),
        )
        self._tiers = TierExecutor(
            self._copier,
            lambda load: self._send(tier_loaded=tier_load_to_proto(load)),
            self._pool,
            self._executor.send_from_host,
            order.mark,
        )

    def _start_sending(
        self,
        link: EngineLink,
        transport: KvTransport,
        order: DeviceOrder,
        layout: KvLayout,
        memory: RankMemory,
    ) -> None:
        host_memory = None
        if self._copier is not None and self._settings.sends_from_host:
            host_memory = self._copier.host_memory
            register_host(transport, host_memory.base_address, host_memory.arena_bytes)
        context = SenderContext(
            ref=self._settings.ref,
            rank=self._rank,
            layout=layout,
            memory=memory,
            transport=transport,
            descriptors=link.find_descriptor,
            event_loop=link.loop,
            on_quiet=self._executor.transfer_quiet,
            credentials=self._settings.credentials,
            kill_timer=KillTimer(),
            host_memory=host_memory,
            hidden_format=hidden_format(self._vllm_config),
        )
        self._sender = RankSender(context)
        layers = layer_kinds(layout, self._rank)
        self._executor.start(order.fence, self._sender, layers, order.mark)
        if self._rank == hidden_state_rank(layout) and self._settings.role != "decode":
            listen(self._executor.hidden_states_computed)

    def handle_preemptions(self, plan: StepPlan) -> None:
        if self._tiers is not None:
            self._tiers.preempt(plan)
        self._executor.preempt(plan)

    def bind_connector_metadata(self, plan: StepPlan) -> None:
        """Before the forward pass of a step."""
        if plan.opened and self._start_sending_later is not None:
            self._send_from_now_on(self._start_sending_later)
        # Opens the transfers that the tiers send blocks of.
        self._executor.begin_step(plan)
        self.arrivals.begin_step(plan.awaited)
        self._comparisons = plan.comparisons
        if self._tiers is not None:
            self._tiers.begin_step(plan)

    def _send_from_now_on(self, start_sending: Callable[[], None]) -> None:
        self._start_sending_later = None
        try:
            start_sending()
        except HeadraceError as error:
            log.error("rank %d sends no prefixes: %s", self._rank, error.detail)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Before the step reads a layer, of which it awaits KV."""
        self.arrivals.wait(self._layer_numbers[layer_name])
        self._fence()

    def save_kv_layer(self, layer_name: str) -> None:
        """A forward pass has written this step's KV of a layer. A draft has a pass for each of its tokens."""
        self._executor.layer_written(self._layer_numbers[layer_name])

    def wait_for_save(self) -> None:
        """After the last forward pass. Does not wait: blocks are freed only when their transfer is quiet."""
        self._executor.forward_ended()
        self._compare()

    def _compare(self) -> None:
        """The compared blocks stay until the step's results are handled."""
        comparisons, self._comparisons = self._comparisons, ()
        for one in comparisons:
            if self._comparer is not None:
                layers = self._comparer.compare(one.received_block, one.computed_block)
                compared = link_pb2.BlocksCompared(comparison_id=one.comparison_id, layers=layers)
                self._send(blocks_compared=compared)

    def get_transfer_results(self) -> tuple[set[str], set[str], set[str]]:
        """After the model's forward pass. See StepExecutor.end_step."""
        sent, received, failed = self._executor.end_step()
        if self._tiers is None:
            return sent, received, failed
        return self._tiers.end_step(sent, received, failed)

    def take_moves(self) -> list[tuple[int, int]]:
        """After the forward pass: moves from and to the remote pool that have ended. See PoolExecutor.take_ended."""
        return [] if self._tiers is None else self._tiers.take_moves()

    def take_ended_host_sends(self) -> list[int]:
        """After the forward pass: sends from main memory that have ended."""
        return self._executor.take_ended_host_sends()

    def shutdown(self) -> None:
        """Ends sending, then the transport."""
        if self._sender is not None:
            self._sender.close()
            try:
                self._sender.closed.result(CLOSE_TIMEOUT_S)
            except TimeoutError:
                log.error("the sender of rank %d did not end in %g s", self._rank, CLOSE_TIMEOUT_S)
        if self._tiers is not None:
            self._tiers.close()
        if self._link is not None:
            self._link.close()
        self._admissions.shutdown(wait=True, cancel_futures=True)
        self._samples.shutdown(wait=True, cancel_futures=True)
        self._sums.shutdown(wait=True, cancel_futures=True)
        if self._transport is not None:
            self._transport.close()

    def _send(self, **message: Any) -> None:
        if self._link is not None:
            self._link.send(link_pb2.AttachRequest(**message))

    def _on_response(self, response: link_pb2.AttachResponse) -> None:
        if response.HasField("stop"):
            self._executor.stop(response.stop.transfer_id)
        elif response.HasField("transfer_event"):
            event = response.transfer_event
            self.arrivals.arrived(event.transfer_id, event.layer_count)
        elif response.HasField("admit_networks"):
            self._admissions.submit(self._admit, response)
        elif response.HasField("sample_first"):
            self._samples.submit(self._sample, response)
        elif response.HasField("open_pool"):
            self._open_pool(response.open_pool)
        elif response.HasField("sum_words"):
            self._sums.submit(self._sum_words, response)

    def _sum_words(self, query: link_pb2.AttachResponse) -> None:
        answer, asked = link_pb2.WordsSummed(), query.sum_words
        addresses, lengths = np.frombuffer(asked.runs, np.int64).reshape(2, -1)
        try:
            assert self._transport is not None
            # Kernels may not see what network adapters have written before.
            self._fence()
            answer.word_sum = self._transport.memory.word_sum(addresses, lengths, asked.seed)
        except (HeadraceError, RuntimeError) as error:
            answer.detail = str(error)
        self._send(words_summed=answer, answered_query_id=query.query_id)

    def _sample(self, query: link_pb2.AttachResponse) -> None:
        sampled = sample_beside_steps(query.sample_first)
        self._send(first_sampled=sampled, answered_query_id=query.query_id)

    def _open_pool(self, opened: link_pb2.OpenPool) -> None:
        if self._pool is None or self._copier is None:
            return
        secret, layout = pool_secret(opened.prefix_hash_key), layout_from_proto(opened.layout)
        memories = (self._copier.pool_memory,)
        # The scheduler withdraws what a lost store had.
        pool = self._settings.pool_opener()(memories, secret, lambda: None)
        self._pool.attach(pool, PoolKeys(secret, layout))

    def _admit(self, query: link_pb2.AttachResponse) -> None:
        """Runs on a thread of its own, because the transport may wait for connections to end."""
        answer = link_pb2.NetworksAdmitted()
        try:
            if self._transport is not None:
                self._transport.admit(parse_networks(query.admit_networks.networks))
        except HeadraceError as error:
            answer.reason, answer.detail = error.reason, error.detail
        self._send(networks_admitted=answer, answered_query_id=query.query_id)
