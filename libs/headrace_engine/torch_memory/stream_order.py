"""Orders the work of a device's streams with the writes of peers.

All lines that need CUDA are here. On a CPU, tensors are computed and copied at once, so waiting does nothing.

A write is acknowledged when it has left the adapter. On some machines it may then not have reached the device, and work
that starts right afterwards would read old bytes.

The device computes in a stream of its own, while peers read and write. Prefill marks the stream when a layer's kernels
are queued, and the layer is read once the mark is passed. Decode fences between the acknowledgement of the last write
and the first kernel that reads. Nothing else is needed:
- A write into staged memory is acknowledged after its copy has ended.
- Kernels that used a block have ended when vLLM reuses it: vLLM keeps a block until the results of the last step that
  was planned with its request have arrived, also with asynchronous scheduling.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from headrace_common.errors import ConfigError, TransferFailed
from headrace_kv.transport.memory import PASSED, Mark, Memory, wait_for


class CopyStream:
    """A queue of device work. One thread at a time uses it.

    It is made of a context, in which torch operations are queued on it, and a function that marks the end of the queued
    work.

    `wait_on_device` makes the device's queue wait for a mark. Without it, the calling thread waits.
    """

    def __init__(
        self,
        use: Callable[[], contextlib.AbstractContextManager[Any]],
        mark: Callable[[], Mark],
        wait_on_device: Callable[[Mark], None] | None = None,
    ) -> None:
        self.use = use
        self._mark = mark
        self._wait_on_device = wait_on_device
        self._lost = False

    def wait(self, mark: Mark, timeout_s: float) -> None:
        """Work that is queued from now on begins after the mark. A device waits by itself, and this call does not.

        Elsewhere it waits, and raises TransferFailed after a timeout or a failure.
        """
        if self._wait_on_device is not None:
            self._wait_on_device(mark)
        elif not wait_for(mark, timeout_s):
            raise TransferFailed(f"the device did not compute within {timeout_s:g} s")

    def drain(self, timeout_s: float) -> None:
        """Waits for all queued work. Raises TransferFailed after a timeout or a failure, and on each later call."""
        # Copies that did not end may still write, so the memory that they use cannot be used again.
        if self._lost:
            raise TransferFailed("the device has stopped copying")
        self._lost = True
        if not wait_for(self._mark(), timeout_s):
            raise TransferFailed(f"the device did not copy KV bytes within {timeout_s:g} s")
        self._lost = False


def open_copy_stream(device: torch.device) -> CopyStream:
    """A stream that runs beside the computation on the device."""
    if device.type != "cuda":
        return CopyStream(contextlib.nullcontext, lambda: PASSED)
    stream = torch.cuda.Stream(device=device)

    def wait(mark: Mark) -> None:
        if mark is not PASSED:
            stream.wait_event(mark)

    return CopyStream(lambda: torch.cuda.stream(stream), stream.record_event, wait)


def mark_compute(device: torch.device) -> Mark:
    """Marks the end of the work that the calling thread has queued on its current stream."""
    if device.type != "cuda":
        return PASSED
    mark: Mark = torch.cuda.current_stream(device).record_event()
    return mark


# From cuda.h: CUdevice_attribute, CUGPUDirectRDMAWritesOrdering, CUflushGPUDirectRDMAWritesOptions, -Target and -Scope.
RDMA_SUPPORTED = 116
FLUSH_OPTIONS = 117
WRITES_ORDERING = 118
ORDERED_FOR_OWNER = 100
FLUSH_BY_HOST = 1
OF_CURRENT_CONTEXT = 0
TO_OWNER = 100


def load_driver() -> Any:
    """The CUDA driver library. Raises ConfigError where there is none."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise ConfigError(f"CUDA's driver cannot be loaded: {error}") from error


def open_flush(driver: Any, device_number: int) -> Callable[[], None] | None:
    """A function that makes acknowledged writes visible to work that is queued after it. None where it is not needed.

    The thread that calls it must have a CUDA context of the device. It raises TransferFailed when it fails.
    Raises ConfigError where adapters cannot reach the device's memory, or the device cannot make writes visible.
    """
    if not _attribute(driver, RDMA_SUPPORTED, device_number):
        raise ConfigError(f"adapters cannot reach the memory of CUDA device {device_number}")
    if _attribute(driver, WRITES_ORDERING, device_number) >= ORDERED_FOR_OWNER:
        return None
    if not _attribute(driver, FLUSH_OPTIONS, device_number) & FLUSH_BY_HOST:
        raise ConfigError(f"CUDA device {device_number} cannot make adapters' writes visible")

    def flush() -> None:
        code = driver.cuFlushGPUDirectRDMAWrites(OF_CURRENT_CONTEXT, TO_OWNER)
        if code != 0:
            raise TransferFailed(
                f"CUDA device {device_number} failed to make adapters' writes visible (code {code})"
            )

    return flush


def _attribute(driver: Any, attribute: int, device_number: int) -> int:
    device, value = ctypes.c_int(), ctypes.c_int()
    for code in (
        driver.cuDeviceGet(ctypes.byref(device), device_number),
        driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device),
    ):
        if code != 0:
            raise ConfigError(
                f"CUDA device {device_number} has no readable attributes (code {code})"
            )
    return value.value


class HostOrder:
    """A CPU computes in the calling thread, and sees its peers' writes."""

    def mark(self) -> Mark:
        return PASSED

    def fence(self) -> None:
        """Nothing to do."""


class CudaOrder:
    """A CUDA device. `flush` is for memory that network adapters write to, see open_flush.

    The thread that queues the computation calls it. Neither method waits for the computation.
    """

    def __init__(self, device: torch.device, flush: Callable[[], None] | None) -> None:
        self._device = device
        self._flush = flush

    def mark(self) -> Mark:
        """Marks the end of the work that the thread has queued so far."""
        return mark_compute(self._device)

    def fence(self) -> None:
        """Work that is queued from now on sees all writes of peers that were acknowledged before.

        Raises TransferFailed when that cannot be guaranteed.
        """
        if self._flush is None:
            return
        with torch.cuda.device(self._device):
            self._flush()


DeviceOrder: TypeAlias = HostOrder | CudaOrder


def open_order(device: torch.device, memory: Memory) -> DeviceOrder:
    """The order between a device's computation and a transport on `memory`.

    Raises ConfigError where the writes of network adapters cannot be ordered.
    """
    if device.type != "cuda":
        return HostOrder()
    flush = None if memory.staged else open_flush(load_driver(), device.index or 0)
    return CudaOrder(device, flush)
