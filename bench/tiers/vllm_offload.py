"""vLLM's offloading into main memory and files on CPUs. vLLM loads it in its engine processes.

Scheduler, lookups, eviction and files are vLLM's own. It refuses to make its own worker without a GPU.
"""

from __future__ import annotations

from vllm.v1.kv_offload.base import CanonicalKVCaches
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from tests.vllm.host_offload import HostWorker


class TieringHostWorker(HostWorker):
    """Copies between the cache and the memory that vLLM's files are written from."""

    def __init__(self, caches: CanonicalKVCaches, region: SharedOffloadRegion) -> None:
        host = [region.create_next_worker_view(one.page_size_bytes) for one in caches.tensors]
        super().__init__(caches, host)
        self._region = region

    def shutdown(self) -> None:
        """Removes the memory's name."""
        self._device, self._host = [], []
        self._region.cleanup()


class HostTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """The class that spec_name names."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> TieringHostWorker:
        """A worker without streams."""
        region = SharedOffloadRegion(
            engine_id=self._engine_id,
            num_chunks=self.num_chunks,
            rank=self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        return TieringHostWorker(kv_caches, region)
