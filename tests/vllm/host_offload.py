"""vLLM's host offloading on CPUs: its own scheduler and manager, with copies without a GPU.

vLLM refuses to make its own worker here: "CPU Offloading is currently only supported on CUDA-alike and XPU GPUs".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

Pages = npt.NDArray[np.int8]
"""Of shape (pages, bytes of a page)."""


class HostWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies whole pages at once: one block a chunk, one cache group. `host`: the pages of each tensor in `caches`."""

    def __init__(self, caches: CanonicalKVCaches, host: Sequence[torch.Tensor]) -> None:
        self._device: list[Pages] = [
            cache.tensor.view(torch.int8).view(-1, cache.page_size_bytes).numpy()
            for cache in caches.tensors
        ]
        self._host: list[Pages] = [pages.numpy() for pages in host]
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """From the cache."""
        return self._copy(job_id, self._device, src_spec, self._host, dst_spec)

    def submit_load(
        self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False
    ) -> bool:
        """Into the cache."""
        return self._copy(job_id, self._host, src_spec, self._device, dst_spec)

    def _copy(
        self,
        job_id: int,
        sources: list[Pages],
        source_spec: BlockIDsLoadStoreSpec,
        targets: list[Pages],
        target_spec: BlockIDsLoadStoreSpec,
    ) -> bool:
        moves = list(
            zip(source_spec.block_ids.tolist(), target_spec.block_ids.tolist(), strict=True)
        )
        for source, target in zip(sources, targets, strict=True):
            for source_id, target_id in moves:
                target[target_id] = source[source_id]
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
        host = [
            torch.empty((self.num_chunks, cache.page_size_bytes), dtype=torch.int8)
            for cache in kv_caches.tensors
        ]
        return HostWorker(kv_caches, host)
