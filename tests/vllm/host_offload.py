"""vLLM's host offloading on CPUs: its own scheduler and manager, with copies without a GPU.

vLLM refuses to make its own worker here: "CPU Offloading is currently only supported on CUDA-alike and XPU GPUs".
"""

from __future__ import annotations

import torch
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class HostWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies whole pages at once: one block a chunk, one cache group."""

    def __init__(self, caches: CanonicalKVCaches, page_count: int) -> None:
        self._device = [cache.tensor for cache in caches.tensors]
        self._host = [
            torch.empty((page_count, *tensor.shape[1:]), dtype=tensor.dtype)
            for tensor in self._device
        ]
        self._done: list[TransferResult] = []

    def submit_store(
        self, job_id: int, src_spec: BlockIDsLoadStoreSpec, dst_spec: BlockIDsLoadStoreSpec
    ) -> bool:
        """From the cache."""
        return self._copy(job_id, self._device, src_spec, self._host, dst_spec)

    def submit_load(
        self, job_id: int, src_spec: BlockIDsLoadStoreSpec, dst_spec: BlockIDsLoadStoreSpec
    ) -> bool:
        """Into the cache."""
        return self._copy(job_id, self._host, src_spec, self._device, dst_spec)

    def _copy(
        self,
        job_id: int,
        sources: list[torch.Tensor],
        source_spec: BlockIDsLoadStoreSpec,
        targets: list[torch.Tensor],
        target_spec: BlockIDsLoadStoreSpec,
    ) -> bool:
        source_ids = torch.from_numpy(source_spec.block_ids).long()
        target_ids = torch.from_numpy(target_spec.block_ids).long()
        for source, target in zip(sources, targets, strict=True):
            target[target_ids] = source[source_ids]
        self._done.append(TransferResult(job_id, success=True))
        return True

    def get_finished(self) -> list[TransferResult]:
        """The copies since the last call."""
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Returns at once: copies are synchronous."""


class HostOffloadingSpec(CPUOffloadingSpec):  # type: ignore[misc]
    """The class that spec_name names."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> HostWorker:
        """A worker without streams."""
        return HostWorker(kv_caches, self.num_chunks)
