"""One rank of the engine: its memory, its transport, its sender and its link."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.engine.v1 import link_pb2
from headrace_common.rpc.channel import TlsFiles
from headrace_engine.torch_memory.event_ordered_sender import EventOrderedSender
from headrace_engine.torch_memory.opening import gate, open_tensor_transport
from headrace_engine.vllm.compat import (
    block_format_of,
    tensor_parallel_rank,
    tensor_parallel_size,
)
from headrace_engine.vllm.link.client import Link
from headrace_engine.vllm.link.messages import report_to_proto
from headrace_engine.vllm.rank.connector_worker import ConnectorWorker, LayerKind
from headrace_engine.vllm.rank.layer_wait import LayerWait
from headrace_engine.vllm.rank.logits_tap import LogitsTap
from headrace_engine.vllm.rank.memory import describe_arena, layout_of, rank_memory
from headrace_engine.vllm.settings import ConnectorSettings
from headrace_engine.vllm.step.groups import LayerGroup
from headrace_engine.vllm.step.plan import StepPlan
from headrace_kv.handoff.logits import LOGITS_RANK
from headrace_kv.handoff.messages import SendReport
from headrace_kv.layout.layout import STATE
from headrace_kv.layout.proto import layout_to_proto, rank_memory_to_proto
from headrace_kv.send.context import SenderContext
from headrace_kv.send.sender import RankSender
from headrace_kv.transport.base import KvTransport

if TYPE_CHECKING:
    from torch import Tensor
    from vllm.config import VllmConfig

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0


class Rank:
    """Starts in two steps: vLLM makes it before it has KV memory, and registers that once."""

    def __init__(
        self, settings: ConnectorSettings, vllm_config: VllmConfig, groups: tuple[LayerGroup, ...]
    ) -> None:
        self._settings = settings
        self._groups = groups
        self._rank = tensor_parallel_rank()
        self._tensor_parallel_size = tensor_parallel_size(vllm_config)
        self._layer_numbers = {name: number for group in groups for number, name in group.layers}
        self._transport: KvTransport | None = None
        self._sender: RankSender | None = None
        self._gate: EventOrderedSender | None = None
        self._link: Link | None = None
        self.side = ConnectorWorker(self._rank, self._report)
        late = settings.overlap_layers
        self._wait = LayerWait(len(self._layer_numbers), late.wait_s) if late.count else None

    def register(self, kv_caches: Mapping[str, Tensor]) -> None:
        """Registers the memory with the transport and attaches to the service."""
        arena = describe_arena(
            kv_caches,
            self._groups,
            rank=self._rank,
            tensor_parallel_size=self._tensor_parallel_size,
            block_format_of=block_format_of,
        )
        layout = layout_of(
            arena,
            fingerprint=self._settings.fingerprint,
            tensor_parallel_size=self._tensor_parallel_size,
        )
        tensor = next(iter(kv_caches.values()))
        transport, order = open_tensor_transport(
            tensor,
            self._settings.transport,
            self._settings.host,
            gpu_direct=self._settings.gpu_direct,
        )
        self._transport = transport
        self.side.fence = order.fence
        if self._wait is not None:
            self._wait.fence = order.fence
        memory = rank_memory(
            arena, rank=self._rank, transport=transport.name, session=transport.session
        )
        attachment = link_pb2.Attachment(
            rank=self._rank, layout=layout_to_proto(layout), memory=rank_memory_to_proto(memory)
        )
        link = Link(Path(self._settings.link_path), attachment, self._hear)
        self._link = link
        if self._settings.role != "decode":
            context = SenderContext(
                ref=self._settings.ref,
                rank=self._rank,
                layout=layout,
                memory=memory,
                transport=transport,
                descriptors=link.find_descriptor,
                event_loop=link.loop,
                on_quiet=self.side.quiet,
                tls=TlsFiles(*self._settings.tls),
            )
            self._sender = RankSender(context)
            self._gate = gate(self._sender, order)
            kinds = [
                LayerKind(layout.group_index(layer), layout.group_of(layer).kind == STATE)
                for layer in range(layout.layer_count)
            ]
            self.side.start(self._gate or self._sender, kinds)
            if self._rank == LOGITS_RANK:
                LogitsTap.listen(self.side.sampled)

    def begin_step(self, plan: StepPlan) -> None:
        """Before the forward pass."""
        if self._wait is not None:
            self._wait.begin_step(plan.late)
        self.side.begin_step(plan)

    def before_attention(self, layer_name: str) -> None:
        """The forward pass is about to read a layer's KV: returns when that is there, or was given up."""
        if self._wait is not None:
            self._wait.before_attention(self._layer_numbers[layer_name])

    def end_step(self) -> tuple[set[str], set[str], set[str]]:
        """After the forward pass. See ConnectorWorker."""
        if self._wait is not None:
            self._wait.end_step()
        return self.side.end_step()

    def take_invalid_blocks(self) -> set[int]:
        """Blocks that the step's forward pass read although they were not whole."""
        return self._wait.take_invalid_blocks() if self._wait is not None else set()

    def layer_written(self, layer_name: str) -> None:
        """The forward pass has written this step's KV of a layer."""
        self.side.layer_written(self._layer_numbers[layer_name])

    def close(self) -> None:
        """Ends sending, then the transport."""
        if self._gate is not None:
            self._gate.close()
        if self._sender is not None:
            self._sender.close()
            try:
                self._sender.closed.result(CLOSE_TIMEOUT_S)
            except TimeoutError:
                log.error("the sender of rank %d did not end in %g s", self._rank, CLOSE_TIMEOUT_S)
        if self._link is not None:
            self._link.close()
        if self._transport is not None:
            self._transport.close()

    def _report(self, report: SendReport) -> None:
        if self._link is not None:
            self._link.send(link_pb2.AttachRequest(report=report_to_proto(report)))

    def _hear(self, response: link_pb2.AttachResponse) -> None:
        if response.HasField("stop"):
            self.side.stop(response.stop.transfer_id)
        elif response.HasField("layers_arrived") and self._wait is not None:
            arrived = response.layers_arrived
            self._wait.heard(arrived.transfer_id, arrived.layer_count, failed=arrived.failed)
