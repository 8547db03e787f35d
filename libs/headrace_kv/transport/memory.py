"""Access to registered memory: the host's here, a device's in headrace_engine.torch_memory."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from headrace_common.errors import ConfigError
from headrace_kv.plan.copy_plan import Int64Array
from headrace_kv.transport.packing import Bytes, gather, scatter


class Memory(Protocol):
    """The memory of one process that holds the ends of runs. Any thread may call its methods."""

    on_host: bool
    """Whether this process can read it by address."""

    staged: bool
    """Whether transports cannot reach it, so that every byte is copied through host memory."""

    def admit(self, base_address: int, nbytes: int) -> None:
        """Raises ConfigError unless [base_address, base_address + nbytes) is such memory and not empty."""

    def allocate(self, nbytes: int) -> Bytes:
        """Allocates host memory for a staging or landing area."""

    def gather(self, addresses: Int64Array, lengths: Int64Array, target: Bytes) -> None:
        """As packing.gather; returns when `target` holds the bytes."""

    def scatter(self, source: Bytes, addresses: Int64Array, lengths: Int64Array) -> None:
        """As packing.scatter; returns when the bytes are in place and `source` may be used again."""


class HostMemory:
    """The host memory of this process."""

    on_host = True
    staged = False

    def admit(self, base_address: int, nbytes: int) -> None:
        if nbytes <= 0:
            raise ConfigError(f"cannot register {nbytes} bytes of KV memory at {base_address:#x}")

    def allocate(self, nbytes: int) -> Bytes:
        return np.empty(nbytes, np.uint8)

    def gather(self, addresses: Int64Array, lengths: Int64Array, target: Bytes) -> None:
        gather(addresses, lengths, target)

    def scatter(self, source: Bytes, addresses: Int64Array, lengths: Int64Array) -> None:
        scatter(source, addresses, lengths)


HOST_MEMORY = HostMemory()


def kind_of(memory: Memory) -> str:
    """ "host", "device", or "device_staged" for a device that transports cannot reach."""
    if memory.on_host:
        return "host"
    return "device_staged" if memory.staged else "device"
