"""Copies between KV memory on a device and main memory of this process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final, Protocol

import numpy as np

from headrace_common.errors import TransferFailed
from headrace_kv.plan.runs import Runs
from headrace_kv.transport.device_mark import Mark, wait_for
from headrace_kv.transport.memory import Memory
from headrace_kv.transport.packing import Bytes, bytes_at

_COMPUTE_TIMEOUT_S: Final = 30.0


class DeviceMemory(Memory, Protocol):
    """KV memory that this process cannot read by address."""

    def lock_pages(self, area: Bytes) -> None:
        """Lets the device copy from and to host memory at once. Raises ConfigError when it cannot."""

    def unlock_pages(self, area: Bytes) -> None:
        """Ends `lock_pages`. Precedes the end of the host memory."""


class DeviceCopies:
    """One thread calls it. `area` is the main memory that all runs lead to.

    What a failed copy has left in main memory is unknown, and the device may still write there. So the caller makes no
    copy after it.
    """

    def __init__(self, memory: DeviceMemory, area: Bytes) -> None:
        self._memory = memory
        self._area = area
        self._failed = False
        memory.lock_pages(area)

    @property
    def failed(self) -> bool:
        """Whether a copy has failed."""
        return self._failed

    def to_host(self, runs: Runs, mark: Mark) -> None:
        """Copies what the device writes before the mark. Raises TransferFailed.

        `runs` lead from the device to main memory.
        """
        with self._after(mark):
            for host, runs_back in _pieces(runs.reverse()):
                self._memory.gather(runs_back.destination_addresses, runs_back.lengths, host)

    def to_device(self, runs: Runs, mark: Mark) -> None:
        """Overwrites what the device reads before the mark. Raises TransferFailed.

        `runs` lead from main memory to the device.
        """
        with self._after(mark):
            for host, piece in _pieces(runs):
                self._memory.scatter(host, piece.destination_addresses, piece.lengths)

    def close(self) -> None:
        """Ends the use of the area, which may then be freed."""
        self._memory.unlock_pages(self._area)

    @contextlib.contextmanager
    def _after(self, mark: Mark) -> Iterator[None]:
        self._failed = True
        if not wait_for(mark, _COMPUTE_TIMEOUT_S):
            raise TransferFailed(f"the device did not compute within {_COMPUTE_TIMEOUT_S:g} s")
        yield
        self._failed = False


def _pieces(runs: Runs) -> Iterator[tuple[Bytes, Runs]]:
    """The source bytes of runs that lie side by side there, and these runs, in the order of their sources."""
    order = np.argsort(runs.source_addresses)
    sources, lengths = runs.source_addresses[order], runs.lengths[order]
    destinations = runs.destination_addresses[order]
    breaks = np.flatnonzero(sources[1:] != sources[:-1] + lengths[:-1]) + 1
    for piece in np.split(np.arange(len(runs)), breaks):
        side_by_side = Runs(sources[piece], destinations[piece], lengths[piece])
        yield bytes_at(int(sources[piece[0]]), side_by_side.payload_bytes), side_by_side
