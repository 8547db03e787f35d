"""One transport for all workers of a process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future

from headrace_kv.plan.copy_plan import Runs
from headrace_kv.transport.base import KvTransport, WriteResult
from headrace_kv.transport.networks import Address, Network, Networks, merge_networks


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
