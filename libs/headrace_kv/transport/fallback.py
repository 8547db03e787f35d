"""Several transports as one: each peer uses the first that reaches it."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Collection, Sequence
from concurrent.futures import Future

from headrace_common.errors import ConfigError, TransferFailed
from headrace_kv.plan.copy_plan import Runs
from headrace_kv.transport.base import KvTransport, WriteResult, failed_future
from headrace_kv.transport.networks import Address, Networks
from headrace_kv.transport.sessions import host_of, join_sessions, session_of

_log = logging.getLogger(__name__)

_PEER_LIMIT = 4096


class FallbackTransport(KvTransport):
    """For each peer, tries `transports` in order and keeps to the first that does not fail before it writes.

    The next transport is used when an error's metadata states that no byte was written: `written_bytes` is "0". Any
    other error is raised.
    """

    name = "auto"

    def __init__(self, transports: Sequence[KvTransport]) -> None:
        if not transports:
            raise ConfigError("give at least one transport")
        self._transports = {transport.name: transport for transport in transports}
        self.memory = transports[0].memory
        self.quiet_after_failure_s = max(t.quiet_after_failure_s for t in transports)
        self.pending_limit = max(transport.pending_limit for transport in transports)
        self.byte_limit = min(transport.byte_limit for transport in transports)
        self.entry_limit = max(transport.entry_limit for transport in transports)
        self._names_by_session: OrderedDict[str, tuple[str, ...]] = OrderedDict()

    @property
    def session(self) -> str:
        return join_sessions({name: t.session for name, t in self._transports.items()})

    def register(self, base_address: int, nbytes: int) -> None:
        for transport in self._transports.values():
            transport.register(base_address, nbytes)

    def admit(self, networks: Networks | None) -> None:
        for transport in self._transports.values():
            transport.admit(networks)

    def source_addresses(self, sessions: Collection[str]) -> frozenset[Address]:
        return frozenset[Address]().union(
            *(transport.source_addresses(sessions) for transport in self._transports.values())
        )

    def route(self, session: str) -> str:
        names = self._names_by_session.get(session)
        return names[0] if names else ""

    def write(self, session: str, runs: Runs, timeout_s: float) -> WriteResult:
        deadline_s = time.monotonic() + timeout_s
        names = self._names(session)
        while True:
            try:
                remaining_s = deadline_s - time.monotonic()
                return self._transports[names[0]].write(session, runs, remaining_s)
            except TransferFailed as error:
                if len(names) == 1 or error.metadata.get("written_bytes") != "0":
                    raise
                _log.info("KV bytes go by %s instead of %s: %s", names[1], names[0], error)
                names = names[1:]
                self._names_by_session[session] = names

    def submit(self, session: str, runs: Runs, timeout_s: float) -> Future[WriteResult]:
        try:
            names = self._names(session)
        except TransferFailed as error:
            return failed_future(error)
        if len(names) > 1:
            # Blocks: only a failure before the write lets the next transport carry it.
            return super().submit(session, runs, timeout_s)
        return self._transports[names[0]].submit(session, runs, timeout_s)

    def close(self) -> None:
        for transport in self._transports.values():
            transport.close()

    def _names(self, session: str) -> tuple[str, ...]:
        """The transports left to try for a peer, by preference."""
        names = self._names_by_session.get(session)
        if names is None:
            # A session without parts names a peer that has only our last transport.
            shared = "=" in session
            ours = tuple(self._transports)
            names = tuple(n for n in ours if session_of(n, session)) if shared else ours[-1:]
            if not names:
                raise TransferFailed(
                    f"no transport of {', '.join(ours)} reaches {host_of(session)}"
                )
            _log.info("KV bytes to %s go by %s", host_of(session), names[0])
            self._names_by_session[session] = names
            if len(self._names_by_session) > _PEER_LIMIT:
                self._names_by_session.popitem(last=False)
        return names
