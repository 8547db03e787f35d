"""vLLM's connector: forwards every hook to the half of the connector that runs in this process."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from headrace_common.errors import ConfigError, HeadraceError
from headrace_common.time_model.model import StepTimes
from headrace_engine.connector.step_plan import StepPlan
from headrace_engine.vllm.cache_groups import read_groups
from headrace_engine.vllm.compat import (
    kv_head_count,
    require_vllm,
    state_group_count,
    tensor_parallel_size,
    uses_latent_attention,
)
from headrace_engine.vllm.deployment import deployment_of
from headrace_engine.vllm.drafts import draft_model
from headrace_engine.vllm.parallel import stage_layers_max
from headrace_engine.vllm.rank.connector_worker import ConnectorWorker
from headrace_engine.vllm.reported_ids import ReportedIds
from headrace_engine.vllm.scheduler.connector_scheduler import ConnectorScheduler

if TYPE_CHECKING:
    from torch import Tensor
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


@dataclass
class HeadraceMetadata(KVConnectorMetadata):
    """Carries a step's plan from the scheduler to the ranks."""

    plan: StepPlan


@dataclass
class EndedMoves(KVConnectorWorkerMetadata):
    """Carries from the ranks to the scheduler what has ended.

    These are moves from and to the remote pool, and sends from main memory.
    """

    moves: list[tuple[int, int]]
    host_sends: list[int]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> EndedMoves:
        """The ends on both ranks."""
        assert isinstance(other, EndedMoves)
        return EndedMoves(self.moves + other.moves, self.host_sends + other.host_sends)


class HeadraceConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM makes one for the engine's scheduler and one for each rank, with another `role`."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        require_vllm()
        super().__init__(vllm_config, role, kv_cache_config)
        self._deployment = deployment_of(vllm_config)
        self._connector_scheduler: ConnectorScheduler | None = None
        self._connector_worker: ConnectorWorker | None = None
        self._reported: ReportedIds | None = ReportedIds()
        """None where a connector around this one has them."""
        try:
            groups = read_groups(
                kv_cache_config,
                kv_head_count=kv_head_count(vllm_config),
                tensor_parallel_size=tensor_parallel_size(vllm_config),
                state_group_count=state_group_count(vllm_config),
                stage_layers_max=stage_layers_max(vllm_config),
                draft=draft_model(vllm_config),
            )
            self._has_one_cache = len(groups) == 1 and groups[0].keeps_all_tokens
            if role == KVConnectorRole.SCHEDULER:
                self._connector_scheduler = self._deployment.open_scheduler(vllm_config, groups)
            else:
                self._connector_worker = self._deployment.open_worker(vllm_config, groups)
        except HeadraceError as exc:
            self._deployment.report_startup_error(exc)
            raise

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """True where the layer hooks must run: a replayed whole graph calls none of them."""
        return extra_config.get("role") != "decode"

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """LBHNC stores a head's tokens in a row, which makes long runs for any number of ranks.

        vLLM takes it as a preference and ignores it where its kernels do not support it.
        """
        return None if uses_latent_attention(vllm_config) else "LBHNC"

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """False: the KV memory stays registered at its address. vLLM calls this from 0.33 on."""
        return False

    # Hooks of a rank.

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        try:
            self._worker().register_kv_caches(kv_caches)
        except HeadraceError as exc:
            self._deployment.report_startup_error(exc)
            raise

    def handle_preemptions(self, kv_connector_metadata: HeadraceMetadata) -> None:
        self._worker().handle_preemptions(kv_connector_metadata.plan)

    def bind_connector_metadata(self, connector_metadata: HeadraceMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._worker().bind_connector_metadata(connector_metadata.plan)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Loads nothing: prefill writes into the cache."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Waits for KV of requests that run beside another worker. All others run once all of theirs has arrived."""
        assert self._connector_worker is not None
        if self._connector_worker.arrivals.awaited:
            self._connector_worker.wait_for_layer_load(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        self._worker().save_kv_layer(layer_name)

    def wait_for_save(self) -> None:
        self._worker().wait_for_save()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        sent, received, failed = self._worker().get_transfer_results()
        return KVConnectorTransferResults(
            finished_sending=sent, finished_recving=received, failed_recving=failed
        )

    def build_connector_worker_meta(self) -> EndedMoves | None:
        moves, host_sends = self._worker().take_moves(), self._worker().take_ended_host_sends()
        return EndedMoves(moves, host_sends) if moves or host_sends else None

    # Hooks of the scheduler.

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._scheduler().bind_kv_cache_manager(kv_cache_manager)

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """True for decode: prefill sends every state, whatever decode has cached of it."""
        return self._deployment.settings.role != "prefill"

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        return self._scheduler().get_loaded_kv_cache_group_ids()

    def on_new_request(self, request: Request) -> None:
        self._scheduler().on_new_request(request)

    def reset_cache(self) -> bool:
        return self._scheduler().reset_cache()

    def has_pending_push_work(self) -> bool:
        return self._scheduler().has_pending_push_work()

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        tokens, loads = self._scheduler().get_num_new_matched_tokens(request, num_computed_tokens)
        if self._reported is not None:
            self._reported.asked(request.request_id, loads=loads)
        return tokens, loads

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self._scheduler().update_state_after_alloc(request, blocks, num_external_tokens)
        if self._reported is not None:
            self._reported.allocated(request.request_id, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> HeadraceMetadata:
        return HeadraceMetadata(self._scheduler().build_connector_meta(scheduler_output))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, EndedMoves):
            self._scheduler().moves_ended(meta.moves)
            self._scheduler().host_sends_ended(meta.host_sends)
        if self._reported is not None:
            self._reported.keep_known(connector_output)
        self._scheduler().update_connector_output(connector_output)

    def take_events(self) -> Iterable[KVCacheEvent]:
        return self._scheduler().take_events()

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        held, params = self._scheduler().request_finished(request, block_ids)
        if self._reported is not None:
            self._reported.finished(request.request_id, held=held)
        return held, params

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def set_loads_beside(self, loads: bool) -> None:
        """Whether another connector loads KV for requests, of which the engine learns with a step's results."""
        self._scheduler().set_loads_beside(loads)

    def leave_reports(self) -> None:
        """A connector around this one checks what ranks report."""
        self._reported = None

    def require_one_cache(self, feature: str) -> None:
        """Raises ConfigError for a model with windows or states, which `feature` cannot serve."""
        if self._has_one_cache:
            return
        error = ConfigError(
            "the model has windows or states, and only full attention can be kept below KV memory: leave out "
            f"{feature}",
            metadata={"field": "engine_args"},
        )
        self._deployment.report_startup_error(error)
        raise error

    def request_left(self, request: Request) -> None:
        """A request is preempted."""
        self._scheduler().request_left(request)

    def take_received(self) -> list[str]:
        """Before a step is scheduled: requests that may run in it, because their KV has arrived."""
        return self._scheduler().take_received()

    @property
    def step_times(self) -> StepTimes:
        """What was learned of the time of steps."""
        return self._scheduler().step_times

    # Hooks of both.

    def shutdown(self) -> None:
        if self._connector_worker is not None:
            self._connector_worker.shutdown()
        if self._connector_scheduler is not None:
            self._connector_scheduler.shutdown()

    def _worker(self) -> ConnectorWorker:
        assert self._connector_worker is not None, "a rank's hook on the scheduler's connector"
        return self._connector_worker

    def _scheduler(self) -> ConnectorScheduler:
        assert self._connector_scheduler is not None, "a scheduler's hook on a rank's connector"
        return self._connector_scheduler
