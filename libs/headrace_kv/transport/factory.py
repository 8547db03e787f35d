"""Makes transports by name."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Final

from headrace_common.errors import ConfigError
from headrace_common.limits import write_quiet_s
from headrace_kv.copy_plan import Runs
from headrace_kv.transport.base import KvTransport, WriteResult
from headrace_kv.transport.guard import Address, Network, Networks, merge_networks
from headrace_kv.transport.memory import HOST_MEMORY, Memory
from headrace_kv.transport.mooncake import open_mooncake
from headrace_kv.transport.staging.scatter_server import LandingLimits
from headrace_kv.transport.staging.strategy import thresholds_of
from headrace_kv.transport.staging.transport import StagedTransport, StagingLimits


class SharedTransport:
    """Opens `open_inner`'s transport for the first user, and closes it after the last one.

    One thread sends for all users. Peers of one user reach the memory of all. Memory that a user has registered stays
    registered, so it must not be freed before the last user has closed.
    """

    def __init__(self, open_inner: Callable[[], KvTransport]) -> None:
        self._open_inner = open_inner
        self._lock = threading.Lock()
        self._inner: KvTransport | None = None
        # By user. None means every host.
        self._admitted: dict[_Share, Networks | None] = {}
        self._union: Networks | None = None

    def open(self, admitted: Networks | None) -> KvTransport:
        """A user's access. `admitted` are its networks until its first `admit`."""
        with self._lock:
            if self._inner is None:
                self._inner = self._open_inner()
            share = _Share(self, self._inner)
            self._set(share, admitted)
            return share

    def admit(self, share: _Share, networks: Networks | None) -> None:
        """Admits the networks of all users."""
        with self._lock:
            if share in self._admitted:
                self._set(share, networks)

    def leave(self, share: _Share) -> None:
        """The user needs the transport no more."""
        with self._lock:
            if share not in self._admitted:
                return
            del self._admitted[share]
            if not self._admitted and self._inner is not None:
                self._inner.close()
                self._inner = None

    def _set(self, share: _Share, networks: Networks | None) -> None:
        admitted = {**self._admitted, share: networks}
        union = _union(admitted.values())
        if self._inner is not None and (not self._admitted or union != self._union):
            self._inner.admit(union)
        self._admitted, self._union = admitted, union


def _union(admitted: Iterable[Networks | None]) -> Networks | None:
    networks: set[Network] = set()
    for one in admitted:
        if one is None:
            return None
        networks.update(one)
    return merge_networks(networks)


class _Share(KvTransport):
    """What one worker sees of the transport."""

    def __init__(self, shared: SharedTransport, inner: KvTransport) -> None:
        self._shared = shared
        self._inner = inner
        self.name = inner.name
        self.quiet_after_failure_s = inner.quiet_after_failure_s
        self.entry_limit = inner.entry_limit
        self.byte_limit = inner.byte_limit
        self.pending_limit = inner.pending_limit
        self.memory = inner.memory

    @property
    def session(self) -> str:
        return self._inner.session

    def register(self, base_address: int, nbytes: int) -> None:
        self._inner.register(base_address, nbytes)

    def write(self, session: str, runs: Runs, timeout_s: float) -> WriteResult:
        return self._inner.write(session, runs, timeout_s)

    def submit(self, session: str, runs: Runs, timeout_s: float) -> Future[WriteResult]:
        return self._inner.submit(session, runs, timeout_s)

    def admit(self, networks: Networks | None) -> None:
        self._shared.admit(self, networks)

    def source_addresses(self, sessions: Collection[str]) -> frozenset[Address]:
        return self._inner.source_addresses(sessions)

    def close(self) -> None:
        self._shared.leave(self)


@dataclass(frozen=True, slots=True)
class TransportPlace:
    """Where a transport moves KV: see open_transport."""

    host: str
    protocol: str
    memory: Memory
    rdma_devices: tuple[str, ...]
    quiet_s: float


OPENERS: Final[dict[str, Callable[[TransportPlace], KvTransport]]] = {
    "mooncake": lambda place: open_mooncake(
        place.host, place.protocol, place.memory, place.rdma_devices
    ),
}
"""By kind: a transport that writes runs as they are. A new transport adds a line."""

# Device memory is only reachable through a slot, so there are slots for more senders, and a refusal is short.
_DEVICE_LIMITS = StagingLimits(
    landing=LandingLimits(senders=32, slot_bytes=2 * 1024 * 1024), retry_s=1.0
)


def open_transport(
    kind: str,
    host: str,
    protocol: str = "auto",
    memory: Memory = HOST_MEMORY,
    *,
    rdma_devices: Sequence[str] = (),
    admitted: Networks | None = None,
    quiet_s: float = write_quiet_s(),
) -> KvTransport:
    """A transport that peers reach at `host`, from `admitted` until its `admit` is called.

    `kind` is "mooncake", or another one of OPENERS.
    `protocol` is Mooncake's "auto", "rdma" or "tcp". `memory` is the memory that holds the KV.
    `rdma_devices` are the adapters that Mooncake may use over RDMA; empty means all.
    `quiet_s` is how long bytes of a lost sender may still land.

    Raises ConfigError for another kind, or when the transport cannot start on this machine.
    """
    transport = _open(kind, TransportPlace(host, protocol, memory, tuple(rdma_devices), quiet_s))
    # No transport has ports before its session is used.
    transport.admit(admitted)
    return transport


def _open(kind: str, place: TransportPlace) -> KvTransport:
    opener = OPENERS.get(kind)
    if opener is None:
        raise ConfigError(f'there is no transport "{kind}": choose {" or ".join(OPENERS)}')
    memory, inner = place.memory, opener(place)
    # Over RDMA, host memory is written run by run: an entry costs about as much as the copy that staging would save,
    # and every rank would pin a landing area.
    if memory.on_host and not inner.stages_host_memory:
        return inner
    limits = StagingLimits() if memory.on_host else _DEVICE_LIMITS
    limits = replace(limits, landing=replace(limits.landing, quiet_s=place.quiet_s))
    return StagedTransport(inner, place.host, thresholds_of(inner.wire), limits, memory=memory)
