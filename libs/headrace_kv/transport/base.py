"""The interface of a transport, and its sessions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal

import numpy as np

from headrace_common.errors import HeadraceError, TransferFailed
from headrace_kv.runs import Runs
from headrace_kv.transport.guard import Address, Networks
from headrace_kv.transport.memory import HOST_MEMORY, Memory

_PART = ";"
_NAME = "="
LANDING_ONLY: Final = "landing"
"""The session part of a peer with memory that only landing slots reach."""

_LANDING_ONLY_NAME = LANDING_ONLY + _NAME


def join_sessions(sessions: Mapping[str, str]) -> str:
    """Joins one session per transport name, in order of preference. A session with parts keeps its own names."""
    return _PART.join(
        session if _NAME in session else f"{name}{_NAME}{session}"
        for name, session in sessions.items()
    )


@lru_cache(maxsize=1024)
def session_of(name: str, session: str) -> str | None:
    """The part of transport `name`: the session itself when it has no parts, None when no part has the name."""
    if _NAME not in session:
        return session
    for part in session.split(_PART):
        found, _, value = part.partition(_NAME)
        if found == name:
            return value
    return None


def host_of(session: str) -> str:
    """The host in a session, for messages: its ports and secrets stay out of them."""
    return find_host(session) or "the peer"


def find_host(session: str) -> str:
    """The host in a session; empty for one without."""
    part = session.rsplit(_PART, maxsplit=1)[-1].rpartition(_NAME)[2]
    return part.partition("/")[0].rpartition(":")[0]


Strategy = Literal["direct", "gather", "scatter", "gather_scatter"]
"""How runs are written.

"direct": one entry per run. "gather": copied into staging memory in the destination's order before the write.
"scatter": written to a landing area, and copied into place by the receiver. "gather_scatter": both.
"""


@dataclass(frozen=True, slots=True)
class WriteResult:
    """The transport and the strategy of a write, and how many entries the transport was given.

    `gather_ns` were spent on copies to staging memory, and `staging_wait_ns` on waits for free slots.
    """

    transport: str
    strategy: Strategy
    entry_count: int
    gather_ns: int = 0
    staging_wait_ns: int = 0


@dataclass(frozen=True, slots=True)
class Thresholds:
    """When entries are so long or so few that to avoid them costs more than to write them.

    `long_bytes`: an entry of this length costs as little as the copies that staging needs for its bytes.
    `few_entries`: as many entries cost as little as the message that asks the receiver to copy.
    """

    long_bytes: int
    few_entries: int = 16

    def are_cheap(self, entry_count: int, payload_bytes: int) -> bool:
        """Whether entries of some bytes together are few, or long on average."""
        return entry_count <= self.few_entries or payload_bytes >= entry_count * self.long_bytes


# A transport ends its futures in time by itself; this bounds the effect of a bug in one.
_GRACE_S = 30.0


class KvTransport(ABC):
    """Moves bytes from this rank's memory into another rank's.

    One thread calls `write`, `submit` and `close`.
    """

    name: str
    """As in RankMemory.transport."""

    quiet_after_failure_s: float
    """How long bytes may still land after `write` has raised."""

    entry_limit: int = 512
    """Runs that one `write` should hold."""

    byte_limit: int = 64 * 1024 * 1024
    """Bytes that one `write` should hold, so that it ends well within a write lease."""

    pending_limit: int = 1
    """How many writes to one peer are worth having in flight."""

    memory: Memory = HOST_MEMORY
    """Reads what is registered."""

    stages_host_memory: bool = False
    """Whether short runs of host memory should be staged: an entry costs more than a copy of its bytes."""

    # Not measured on a real adapter. Chosen so that only very short runs are staged.
    thresholds: Thresholds = Thresholds(long_bytes=12 * 1024, few_entries=64)

    @property
    def wire(self) -> str:
        """The transport and its protocol, as in WriteResult.transport."""
        return self.name

    @property
    @abstractmethod
    def session(self) -> str:
        """The address of this transport for peers, as in RankMemory.session."""

    @abstractmethod
    def register(self, base_address: int, nbytes: int) -> None:
        """Lets [base_address, base_address + nbytes) be read and written. Raises ConfigError when it cannot."""

    @abstractmethod
    def submit(self, session: str, runs: Runs, timeout_s: float) -> Future[WriteResult]:
        """Starts to copy the runs into the memory of `session`. The future is done when they have landed.

        It raises TransferFailed: then an unknown part has landed, and more may land for `quiet_after_failure_s`. It is
        done within about `timeout_s`, later where a library cannot be interrupted. Until then the source must not
        change. Blocks while the transport cannot accept more.
        """

    def write(self, session: str, runs: Runs, timeout_s: float) -> WriteResult:
        """Submits a write, and returns or raises what its future holds."""
        try:
            return self.submit(session, runs, timeout_s).result(max(0.0, timeout_s) + _GRACE_S)
        except TimeoutError:
            raise TransferFailed("the transport does not end a write") from None

    def admit(self, networks: Networks | None) -> None:  # noqa: B027
        """From now on only hosts in `networks` reach the ports that peers write to. None means every host.

        Ends the connections of other hosts. Any thread may call it, also before there are ports. A transport without
        ports ignores it. Raises QueueFull when there are too many networks, or ConfigError when the kernel refuses.
        """

    def source_addresses(self, sessions: Collection[str]) -> frozenset[Address]:
        """The addresses from which this transport connects to peers with `sessions`. Any thread may call it.

        May block for the time of a look-up.
        """
        return frozenset()

    @abstractmethod
    def close(self) -> None:
        """Ends the transport; afterwards nothing lands any more. May be called twice."""


class DirectFirst(KvTransport):
    """A transport around `inner`, which writes as they are the runs that `inner` reaches and writes at low cost.

    These are at most `direct_entries_max` runs, or runs of `direct_bytes_min` or more each, unless only landing slots
    reach the peer's memory.
    """

    inner: KvTransport
    direct_entries_max: int
    direct_bytes_min: int

    def submit(self, session: str, runs: Runs, timeout_s: float) -> Future[WriteResult]:
        lengths = runs.lengths
        cheap = len(lengths) <= self.direct_entries_max or (
            np.minimum.reduce(lengths) >= self.direct_bytes_min
        )
        if cheap and _LANDING_ONLY_NAME not in session:
            return self.inner.submit(session, runs, timeout_s)
        return self.submit_costly(session, runs, timeout_s)

    @abstractmethod
    def submit_costly(self, session: str, runs: Runs, timeout_s: float) -> Future[WriteResult]:
        """As `submit`, for all other writes."""


def failed_future(error: HeadraceError) -> Future[WriteResult]:
    """A future that has ended with an error."""
    future: Future[WriteResult] = Future()
    future.set_exception(error)
    return future
