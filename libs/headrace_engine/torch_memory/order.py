"""Orders a device's computation and its peers' reads and writes of KV memory.

The device computes in a stream of its own, while peers read and write. Prefill marks the stream when a layer's kernels
are queued, and the layer is read once the mark is passed. Decode fences between the acknowledgement of the last write
and the first kernel that reads. Nothing else is needed:
- A write into staged memory is acknowledged after its copy has ended.
- Kernels that used a block have ended when vLLM reuses it. Without asynchronous scheduling, blocks are reused only
  after the step's results have arrived.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from headrace_engine.torch_memory.peer_writes import load_driver, open_flush
from headrace_engine.torch_memory.streams import mark_compute
from headrace_kv.transport.memory import Mark, Memory


class DeviceOrder(Protocol):
    """The thread that queues the computation calls it. Neither method waits for the computation."""

    queues: bool
    """Whether the device may execute kernels after the thread's call has returned."""

    def mark(self) -> Mark:
        """Marks the end of the work that the thread has queued so far."""

    def fence(self) -> None:
        """Work that is queued from now on sees all writes of peers that were acknowledged before.

        Raises TransferFailed when that cannot be guaranteed.
        """


class HostOrder:
    """A CPU computes in the calling thread, and sees its peers' writes."""

    queues = False

    def mark(self) -> Mark:
        return mark_compute(torch.device("cpu"))

    def fence(self) -> None:
        """Nothing to do."""


class CudaOrder:
    """A CUDA device. `flush` is for memory that network adapters write to, see open_flush."""

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
    """The order between a device's computation and a transport on `memory`.

    Raises ConfigError where the writes of network adapters cannot be ordered.
    """
    if device.type != "cuda":
        return HostOrder()
    flush = None if memory.staged else open_flush(load_driver(), device.index or 0)
    return CudaOrder(device, flush)
