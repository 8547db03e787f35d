"""Several transports as one: each peer is reached by the first that can."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future

from headrace_common.errors import ConfigError, TransferFailed
from headrace_kv.plan.copy_plan import Runs
from headrace_kv.transport.base import KvTransport, WriteResult, failed
from headrace_kv.transport.sessions import join_sessions, session_of

_log = logging.getLogger(__name__)

_CHOICE_LIMIT = 4096


class FallbackTransport(KvTransport):
    """Tries `transports` in order and stays, for each peer, with the first that has not failed before writing.

    A transport is given up for a peer when its error's metadata says that no byte was written (`written_bytes` is "0")
    and another is left; every other error is the caller's.
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
        self._choices: OrderedDict[str, tuple[str, ...]] = OrderedDict()

    @property
    def session(self) -> str:
        return join_sessions({name: t.session for name, t in self._transports.items()})

    def register(self, base_address: int, nbytes: int) -> None:
        for transport in self._transports.values():
            transport.register(base_address, nbytes)

    def route(self, session: str) -> str:
        choices = self._choices.get(session)
        return choices[0] if choices else ""

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
                self._choices[session] = names

    def submit(self, session: str, runs: Runs, timeout_s: float) -> Future[WriteResult]:
        try:
            names = self._names(session)
        except TransferFailed as error:
            return failed(error)
        if len(names) > 1:
            # Whether the next is needed must be known before it is too late to turn to it.
            return super().submit(session, runs, timeout_s)
        return self._transports[names[0]].submit(session, runs, timeout_s)

    def close(self) -> None:
        for transport in self._transports.values():
            transport.close()

    def _names(self, session: str) -> tuple[str, ...]:
        """The transports that are still worth trying for a peer, by preference."""
        names = self._choices.get(session)
        if names is None:
            # A session without parts is that of a peer whose only transport is our last.
            shared = "=" in session
            ours = tuple(self._transports)
            names = tuple(n for n in ours if session_of(n, session)) if shared else ours[-1:]
            if not names:
                raise TransferFailed(f'no transport of {", ".join(ours)} reaches "{session}"')
            _log.info("KV bytes to %s go by %s", session_of(ours[-1], session), names[0])
            self._choices[session] = names
            if len(self._choices) > _CHOICE_LIMIT:
                self._choices.popitem(last=False)
        return names
