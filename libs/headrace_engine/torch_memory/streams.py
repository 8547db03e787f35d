"""CUDA work beside the computation: a stream of copies, and marks in the stream of kernels.

All lines that need CUDA are here. On a CPU, tensors are computed and copied at once, so waiting does nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Protocol

import torch

from headrace_common.errors import TransferFailed
from headrace_kv.transport.memory import PASSED, Mark, wait_for


class CopyStream(Protocol):
    """A queue of device work. One thread at a time uses it."""

    def use(self) -> contextlib.AbstractContextManager[Any]:
        """Torch operations inside are queued on this stream."""

    def drain(self, timeout_s: float) -> None:
        """Waits for all queued work. Raises TransferFailed after a timeout or a failure, and on each later call."""


class DrainedStream:
    """A CopyStream made of a context for operations and a function that marks the end of the queued work."""

    def __init__(
        self, use: Callable[[], contextlib.AbstractContextManager[Any]], mark: Callable[[], Mark]
    ) -> None:
        self.use = use
        self._mark = mark
        self._lost = False

    def drain(self, timeout_s: float) -> None:
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
        return DrainedStream(contextlib.nullcontext, lambda: PASSED)
    stream = torch.cuda.Stream(device=device)
    return DrainedStream(lambda: torch.cuda.stream(stream), stream.record_event)


def mark_compute(device: torch.device) -> Mark:
    """Marks the end of the work that the calling thread has queued on its current stream."""
    if device.type != "cuda":
        return PASSED
    mark: Mark = torch.cuda.current_stream(device).record_event()
    return mark
