"""Headrace's connector beside vLLM's OffloadingConnector: a request loads from both."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiConnector,
    MultiKVConnectorMetadata,
    MultiKVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.v1.kv_offload.base import BlockIDsLoadStoreSpec

from headrace_common.time_model.model import StepTimes
from headrace_engine.connector.transfers import BlockHolds
from headrace_engine.vllm.connector import HeadraceConnector
from headrace_engine.vllm.reported_ids import ReportedIds
from headrace_engine.vllm.scheduler.connector_scheduler import VllmPoolBlocks

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

_OURS: Final = 0
_OFFLOADING: Final = 1


@dataclass
class JoinedMetadata(MultiKVConnectorMetadata):
    """`loads_of_both`: requests of this step that load from both connectors."""

    loads_of_both: frozenset[str] = frozenset()


class HeadraceOffloadingConnector(MultiConnector):
    """Its connectors are HeadraceConnector and OffloadingConnector, in this order.

    vLLM's own MultiConnector loads a request from one of them. Here, the offloaded tokens are loaded, and those after
    them come by a transfer.

    Peers write into free blocks as soon as a request has them. vLLM stores a block one or two steps after it was
    computed, and prevents only its own steps from writing there before. So blocks are held until they are stored (I2).
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._ours.require_one_cache("OffloadingConnector")
        self._ours.leave_reports()
        self._rank_count: int = vllm_config.parallel_config.world_size
        self._begin()

    def _begin(self) -> None:
        self._reported = ReportedIds()
        self._hits: dict[str, int] = {}
        self._loads_of_both: set[str] = set()
        self._loading: set[str] = set()
        self._holds = BlockHolds()
        self._ended: list[str] = []
        self._missing_reports: dict[int, int] = {}
        # On a rank: requests that load from both, with the connectors that have not ended their load.
        self._missing_loads: dict[str, set[int]] = {}
        self._failed: set[str] = set()

    @property
    def _ours(self) -> HeadraceConnector:
        ours = self._connectors[_OURS]
        assert isinstance(ours, HeadraceConnector)
        return ours

    # Hooks of a rank.

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(connector_metadata, JoinedMetadata)
        for request_id in connector_metadata.loads_of_both:
            self._missing_loads[request_id] = {_OURS, _OFFLOADING}
        super().bind_connector_metadata(connector_metadata)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """A request that loads from both has ended when both loads have ended."""
        # vLLM's offloading never delays the end of a request.
        sent: set[str] = set()
        received: set[str] = set()
        for number, connector in enumerate(self._connectors):
            one = connector.get_transfer_results(finished_req_ids)
            sent |= one.finished_sending
            self._failed |= one.failed_recving
            for request_id in one.finished_recving:
                missing = self._missing_loads.get(request_id, set())
                missing.discard(number)
                if not missing:
                    self._missing_loads.pop(request_id, None)
                    received.add(request_id)
        failed = self._failed & received
        self._failed -= failed
        return KVConnectorTransferResults(sent, received, failed)

    # Hooks of the scheduler.

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._holds.bind(VllmPoolBlocks(kv_cache_manager.block_pool))

    @property
    def step_times(self) -> StepTimes:
        """What was learned of the time of steps."""
        return self._ours.step_times

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        return self._ours.get_loaded_kv_cache_group_ids(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        offloading = self._connectors[_OFFLOADING]
        hit, _ = offloading.get_num_new_matched_tokens(request, num_computed_tokens)
        if hit is None:
            return None, False
        missing, _ = self._ours.get_num_new_matched_tokens(request, num_computed_tokens + hit)
        if missing is None:
            return None, False
        self._hits[request.request_id] = hit
        loads = hit + missing > 0
        self._reported.asked(request.request_id, loads=loads)
        return hit + missing, loads

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self._reported.allocated(request.request_id, num_external_tokens)
        hit = min(self._hits.pop(request.request_id, 0), num_external_tokens)
        missing = num_external_tokens - hit
        self._connectors[_OFFLOADING].update_state_after_alloc(request, blocks, hit)
        self._ours.update_state_after_alloc(request, blocks, missing)
        if hit:
            self._loading.add(request.request_id)
        if hit and missing:
            self._loads_of_both.add(request.request_id)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> JoinedMetadata:
        self._ours.set_loads_beside(bool(self._loading))
        metadata = super().build_connector_meta(scheduler_output).metadata
        offloading = metadata[_OFFLOADING]
        assert isinstance(offloading, OffloadingConnectorMetadata)
        for number, job in offloading.store_jobs.items():
            assert isinstance(job.src_spec, BlockIDsLoadStoreSpec)
            self._holds.hold(_name(number), (job.src_spec.block_ids.tolist(),))
            self._missing_reports[number] = self._rank_count
        for name in self._ended:
            self._holds.release(name)
        self._ended = []
        joined, self._loads_of_both = frozenset(self._loads_of_both), set()
        return JoinedMetadata(metadata, loads_of_both=joined)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._reported.keep_known(connector_output)
        super().update_connector_output(connector_output)
        self._loading.difference_update(connector_output.finished_recving or ())
        metadata = connector_output.kv_connector_worker_meta
        if isinstance(metadata, MultiKVConnectorWorkerMetadata):
            offloading = metadata.metadata[_OFFLOADING]
            if isinstance(offloading, OffloadingWorkerMetadata):
                self._jobs_ended(offloading.completed_jobs.items())

    def _jobs_ended(self, reports: Iterable[tuple[int, int]]) -> None:
        """Takes how many ranks have ended each job. Loads hold nothing."""
        for number, ranks in reports:
            missing = self._missing_reports.pop(number, ranks) - ranks
            if missing:
                self._missing_reports[number] = missing
            else:
                self._holds.release(_name(number))

    def has_pending_push_work(self) -> bool:
        return bool(self._holds) or super().has_pending_push_work()

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._hits.pop(request.request_id, None)
        # vLLM plans the stores of an ended request with the next step.
        name = f"request {request.request_id}"
        self._holds.hold(name, block_ids[:1])
        self._ended.append(name)
        delayed: bool
        params: dict[str, Any] | None
        delayed, params = super().request_finished_all_groups(request, block_ids)
        self._reported.finished(request.request_id, held=delayed)
        return delayed, params


def _name(number: int) -> str:
    return f"store {number}"
