"""vLLM's connector: forwards each hook to the scheduler's or the rank's side, and knows nothing else."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from headrace.engine.v1 import link_pb2
from headrace_common.errors import HeadraceError
from headrace_engine.vllm.compat import (
    block_counts,
    kv_head_count,
    require_vllm,
    tensor_parallel_size,
    uses_latent_attention,
)
from headrace_engine.vllm.link.client import Link
from headrace_engine.vllm.link.messages import (
    NANOSECONDS,
    load_to_proto,
    reservation_to_proto,
    unix_ns,
)
from headrace_engine.vllm.link.startup_failure import write_failure
from headrace_engine.vllm.rank import continuation
from headrace_engine.vllm.rank.cache_groups import read_groups
from headrace_engine.vllm.rank.rank import Rank
from headrace_engine.vllm.scheduler.connector_scheduler import (
    LONG_STEP_S,
    SHORT_STEP_S,
    ConnectorScheduler,
    ScheduledRequest,
)
from headrace_engine.vllm.scheduler.load import LoadMeter, report_changes
from headrace_engine.vllm.standalone.logs import join_vllm_log
from headrace_engine.vllm.standalone.node import StandaloneNode
from headrace_engine.vllm.standalone.requests import is_complete, prompt_of
from headrace_engine.vllm.standalone.settings import Settings, settings_of
from headrace_engine.vllm.step.groups import LayerGroup, check_late_layers
from headrace_engine.vllm.step.plan import StepPlan

if TYPE_CHECKING:
    from torch import Tensor
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

log = logging.getLogger(__name__)


@dataclass
class HeadraceMetadata(KVConnectorMetadata):
    """Carries a step's plan from the scheduler to the ranks."""

    plan: StepPlan


class HeadraceConnector(KVConnectorBase_V1, SupportsHMA):
    """One for the engine's scheduler and one per rank; vLLM says which by `role`."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        require_vllm()
        super().__init__(vllm_config, role, kv_cache_config)
        settings = settings_of(vllm_config)
        self._settings = settings.connector
        self._standalone = settings.standalone is not None
        if self._standalone:
            join_vllm_log()
        self._rank: Rank | None = None
        self._scheduler: ConnectorScheduler | None = None
        self._link: Link | None = None
        self._load = LoadMeter()
        self._reporting: Future[None] | None = None
        self._flush = False
        self._pairing: StandaloneNode | None = None
        try:
            groups = read_groups(
                kv_cache_config,
                kv_head_count=kv_head_count(vllm_config),
                tensor_parallel_size=tensor_parallel_size(vllm_config),
            )
            check_late_layers(groups, self._settings.overlap_layers)
            self._group_ids = tuple(sorted(group.index for group in groups))
            if role == KVConnectorRole.SCHEDULER:
                self._start_scheduler(groups, settings, tensor_parallel_size(vllm_config))
            else:
                self._rank = Rank(self._settings, vllm_config, groups)
                if not self._standalone:
                    continuation.install(vllm_config)
        except HeadraceError as exc:
            self._note(exc)
            raise

    def _note(self, error: HeadraceError) -> None:
        """Tells the service why its engine does not start; without one, vLLM's log is all there is."""
        if not self._standalone:
            write_failure(Path(self._settings.link_path), error)

    def _start_scheduler(
        self, groups: tuple[LayerGroup, ...], settings: Settings, rank_count: int
    ) -> None:
        if settings.standalone is not None:
            self._pairing = StandaloneNode(settings.connector, settings.standalone, rank_count)
            self._scheduler = ConnectorScheduler(groups, self._pairing.reserved)
            self._pairing.start(self._scheduler.settle, self._scheduler.arriving)
            return
        scheduler = ConnectorScheduler(
            groups,
            lambda reservation: link.send(
                link_pb2.AttachRequest(reserved=reservation_to_proto(reservation))
            ),
        )

        def hear(response: link_pb2.AttachResponse) -> None:
            if response.HasField("arrived"):
                scheduler.settle(response.arrived.transfer_id, whole=True)
            elif response.HasField("arriving"):
                arriving = response.arriving
                deadline_unix_s = unix_ns(arriving.deadline_time) / NANOSECONDS
                scheduler.arriving(arriving.transfer_id, deadline_unix_s)
            elif response.HasField("first_token"):
                first = response.first_token
                scheduler.first_token(first.transfer_id, first.token_id)
            elif response.HasField("released"):
                scheduler.settle(response.released.transfer_id, whole=False)
            elif response.HasField("request_coming"):
                scheduler.request_coming()

        link = Link(Path(self._settings.link_path), link_pb2.Attachment(scheduler=True), hear)
        self._scheduler, self._link = scheduler, link
        self._reporting = asyncio.run_coroutine_threadsafe(
            report_changes(
                self._load, lambda load: link.send(link_pb2.AttachRequest(load=load_to_proto(load)))
            ),
            link.loop,
        )
        self._reporting.add_done_callback(_log_failure)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Whole graphs are replayed without the hooks that say that a layer is written, or wait until one is there."""
        return extra_config.get("role") != "decode" or bool(extra_config.get("overlap_layers"))

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """A wish, which vLLM drops where its kernels cannot: a head's tokens in a row make long runs for any ranks."""
        return None if uses_latent_attention(vllm_config) else "LBHNC"

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """The KV memory stays registered where it is. Asked from vLLM 0.33 on."""
        return False

    # On a rank.

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        try:
            self._require_rank().register(kv_caches)
        except HeadraceError as exc:
            self._note(exc)
            raise

    def handle_preemptions(self, kv_connector_metadata: HeadraceMetadata) -> None:
        self._require_rank().side.preempt(kv_connector_metadata.plan)

    def bind_connector_metadata(self, connector_metadata: HeadraceMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._require_rank().begin_step(connector_metadata.plan)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Nothing to load: prefill writes into the cache."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._require_rank().before_attention(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        self._require_rank().layer_written(layer_name)

    def wait_for_save(self) -> None:
        """Nothing to wait for: blocks are freed only when their transfer is quiet."""
        self._require_rank().side.states_written()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        sent, received, failed = self._require_rank().end_step()
        return KVConnectorTransferResults(
            finished_sending=sent, finished_recving=received, failed_recving=failed
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._require_rank().take_invalid_blocks()

    # On the scheduler.

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._load.bind(lambda: block_counts(kv_cache_manager))
        self._require_scheduler().late.evict = kv_cache_manager.evict_blocks

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """A state is always handed over, whatever decode has cached of it."""
        return self._settings.role != "prefill"

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """All groups: vLLM must not clear blocks that prefill may be writing into."""
        return self._group_ids

    def on_new_request(self, request: Request) -> None:
        self._load.added(request.request_id)
        # Without our services, a request's arguments are what its client says.
        if not self._standalone:
            continuation.begin(request)

    def reset_cache(self) -> bool:
        """The prefix cache was emptied: asks for a step, since only steps publish events."""
        self._flush = True
        return True

    def has_pending_push_work(self) -> bool:
        return self._flush

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if num_computed_tokens and self._require_scheduler().late.unsure:
            # What it shares might be what another request still waits for.
            return None, False
        if self._pairing is not None and not self._pairing.scheduler.prepare(prompt_of(request)):
            return None, False
        missing = self._require_scheduler().missing_tokens(
            request.kv_transfer_params, request.num_tokens, num_computed_tokens
        )
        return missing, missing > 0

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self._require_scheduler().allocated(
            request.request_id,
            request.kv_transfer_params,
            blocks.get_block_ids(),
            request.num_tokens,
            num_external_tokens,
            partial(continuation.add_first_token, request),
        )

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> HeadraceMetadata:
        preempted = scheduler_output.preempted_req_ids or ()
        self._flush = False
        self._load.stepped(scheduler_output.num_scheduled_tokens, preempted)
        scheduler = self._require_scheduler()
        if not scheduler_output.total_num_scheduled_tokens:
            scheduler.wait_for_news(SHORT_STEP_S if self._standalone else LONG_STEP_S)
        plan = scheduler.plan_step(scheduled_requests(scheduler_output), preempted)
        if self._pairing is not None:
            self._pairing.scheduler.add_held(plan)
        return HeadraceMetadata(plan)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        received = connector_output.finished_recving
        if received:
            received -= self._require_scheduler().late.withheld(received)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._load.finished(request.request_id)
        late = self._require_scheduler().late.finished(request.request_id)
        times = self._require_scheduler().finished(request.request_id)
        if self._pairing is not None:
            held, params = self._pairing.scheduler.finished(
                prompt_of(request),
                self._require_scheduler().in_layout_order(block_ids),
                opened=times is not None,
                complete=is_complete(request),
            )
            return late or held or times is not None, params
        return (late, None) if times is None else (True, times.to_params())

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def shutdown(self) -> None:
        if self._rank is not None:
            self._rank.close()
        if self._reporting is not None:
            self._reporting.cancel()
        if self._link is not None:
            self._link.close()
        if self._pairing is not None:
            self._pairing.close()

    def _require_rank(self) -> Rank:
        assert self._rank is not None, "a rank's hook was called on the scheduler's connector"
        return self._rank

    def _require_scheduler(self) -> ConnectorScheduler:
        assert self._scheduler is not None, "the scheduler's hook was called on a rank's connector"
        return self._scheduler


def _log_failure(reporting: Future[None]) -> None:
    error = None if reporting.cancelled() else reporting.exception()
    if error is not None:
        log.error("the engine's load is not reported any more", exc_info=error)


def scheduled_requests(output: SchedulerOutput) -> Iterator[ScheduledRequest]:
    """The step's requests in our words."""
    steps = output.num_scheduled_tokens
    for new in output.scheduled_new_reqs:
        yield ScheduledRequest(
            new.req_id, new.num_computed_tokens, steps[new.req_id], new.block_ids, True
        )
    cached = output.scheduled_cached_reqs
    for request_id, computed, block_ids in zip(
        cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
    ):
        yield ScheduledRequest(
            request_id,
            computed,
            steps[request_id],
            block_ids or (),
            request_id in cached.resumed_req_ids,
        )
