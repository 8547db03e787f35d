"""Makes transports by name."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from headrace_common.errors import ConfigError
from headrace_common.limits import write_quiet_s
from headrace_kv.transport.base import KvTransport
from headrace_kv.transport.guard import Network, Networks, merge_networks
from headrace_kv.transport.memory import HOST_MEMORY, Memory
from headrace_kv.transport.mooncake import open_mooncake
from headrace_kv.transport.scatter import StagingLimits
from headrace_kv.transport.staging import StagedTransport


@dataclass(frozen=True, slots=True, eq=False)
class TransportUse:
    """One worker's use of a transport, which may have other users. `admit` and `close` are those of KvTransport."""

    transport: KvTransport
    admit: Callable[[Networks | None], None]
    close: Callable[[], None]

    @classmethod
    def sole(cls, transport: KvTransport) -> TransportUse:
        """The use of a transport by its only user."""
        return cls(transport, transport.admit, transport.close)


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
        self._admitted: dict[int, Networks | None] = {}
        self._last_user = 0
        self._union: Networks | None = None

    def open(self, admitted: Networks | None) -> TransportUse:
        """A user's access. `admitted` are its networks until its first `admit`."""
        with self._lock:
            if self._inner is None:
                self._inner = self._open_inner()
            self._last_user += 1
            user = self._last_user
            self._set(user, admitted)
            return TransportUse(self._inner, partial(self._admit, user), partial(self._leave, user))

    def _admit(self, user: int, networks: Networks | None) -> None:
        with self._lock:
            if user in self._admitted:
                self._set(user, networks)

    def _leave(self, user: int) -> None:
        with self._lock:
            if user in self._admitted:
                del self._admitted[user]
            if not self._admitted and self._inner is not None:
                self._inner.close()
                self._inner = None

    def _set(self, user: int, networks: Networks | None) -> None:
        admitted = {**self._admitted, user: networks}
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


Opener = Callable[[str, str, Memory, Sequence[str]], KvTransport]
"""Opens a transport that writes runs as they are, from host, protocol, memory and RDMA devices."""

OPENERS: Final[dict[str, Opener]] = {"mooncake": open_mooncake}
"""By kind. A new transport adds an entry."""


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
    opener = OPENERS.get(kind)
    if opener is None:
        raise ConfigError(f'there is no transport "{kind}": choose {" or ".join(OPENERS)}')
    transport = opener(host, protocol, memory, rdma_devices)
    # Over RDMA, host memory is written run by run: an entry costs about as much as the copy that staging would save,
    # and every rank would pin a landing area.
    if not memory.on_host or transport.stages_host_memory:
        limits = StagingLimits(quiet_s=quiet_s)
        if not memory.on_host:
            # Reachable only through a slot, so there are slots for more senders, and a refusal is short.
            limits = replace(limits, senders=32, slot_bytes=2 * 1024 * 1024, retry_s=1.0)
        transport = StagedTransport(transport, host, transport.thresholds, limits, memory=memory)
    # No transport has ports before its session is used.
    transport.admit(admitted)
    return transport
