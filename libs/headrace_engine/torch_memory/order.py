"""Who may touch KV memory when: the device computes in a stream of its own, and peers read and write beside it.

Prefill marks the stream when a layer's kernels are queued, and the layer is read once the mark is passed. Decode fences
between the acknowledgement of the last write and the first kernel that reads. Nothing else is needed. Before a write
into staged memory is acknowledged, its copy has been waited for. Kernels that used a block before are done when vLLM
lends it out, because without asynchronous scheduling blocks change hands only after the step's results have come.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from headrace_engine.torch_memory.event_ordered_sender import Mark
from headrace_engine.torch_memory.peer_writes import load_driver, open_flush
from headrace_engine.torch_memory.streams import mark_compute
from headrace_kv.transport.memory import Memory


class DeviceOrder(Protocol):
    """Called by the thread that queues the computation; neither call waits for it."""

    queues: bool
    """Whether what the thread has called may still be to come on the device."""

    def mark(self) -> Mark:
        """The end of what the thread has queued so far."""

    def fence(self) -> None:
        """All that is queued from now on sees what peers had written, and knew to be written, before.

        Raises TransferFailed when that cannot be known.
        """


class HostOrder:
    """Processors compute in the calling thread, and see their peers' writes."""

    queues = False

    def mark(self) -> Mark:
        return mark_compute(torch.device("cpu"))

    def fence(self) -> None:
        """Nothing to do."""


class CudaOrder:
    """A CUDA device; `flush` is for memory that adapters write to, see open_flush."""

    queues = True

    def __init__(self, device: torch.device, flush: Callable[[], None] | None) -> None:
        self._device = device
        self._flush = flush

    def mark(self) -> Mark:
        return mark_compute(self._device)

    def fence(self) -> None:
        if self._flush is None:
            return
        with torch.cuda.device(self._device):
            self._flush()


def open_order(device: torch.device, memory: Memory) -> DeviceOrder:
    """The order between a device's computation and a transport that reads and writes `memory`.

    Raises ConfigError where what adapters write cannot be ordered.
    """
    if device.type != "cuda":
        return HostOrder()
    flush = None if memory.staged else open_flush(load_driver(), device.index or 0)
    return CudaOrder(device, flush)
