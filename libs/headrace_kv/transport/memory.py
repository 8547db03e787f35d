"""How short runs get in and out of registered memory: the host's here, a device's elsewhere."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from headrace_common.errors import ConfigError
from headrace_kv.plan.copy_plan import Int64Array
from headrace_kv.transport.packing import Bytes, gather, scatter


class Memory(Protocol):
    """The memory of one process that runs start and end in. Every method may be called from any thread."""

    on_host: bool
    """Whether this process can read it like any memory of its own."""

    staged: bool
    """Whether a transport cannot reach it, so that every byte has to cross host memory."""

    def admit(self, base_address: int, nbytes: int) -> None:
        """Raises ConfigError unless [base_address, base_address + nbytes) is such memory and not empty."""

    def allocate(self, nbytes: int) -> Bytes:
        """Host memory to gather to and to scatter from: a staging or landing area."""

    def gather(self, addresses: Int64Array, lengths: Int64Array, target: Bytes) -> None:
        """As packing.gather; returns when `target` holds the bytes."""

    def scatter(self, source: Bytes, addresses: Int64Array, lengths: Int64Array) -> None:
        """As packing.scatter; returns when the bytes are in place and `source` may be used again."""


class HostMemory:
    """This process's own memory, wherever it is registered."""

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
