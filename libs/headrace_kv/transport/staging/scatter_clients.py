"""The streams to the scatter servers of all peers."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict

from headrace_common.errors import TransferFailed
from headrace_kv.transport.sessions import host_of
from headrace_kv.transport.staging.scatter_client import ScatterClient, ScatterWatchdog
from headrace_kv.transport.staging.scatter_server import LandingLimits

_log = logging.getLogger(__name__)

_ATTACH_TIMEOUT_S = 2.0
_CLIENT_LIMIT = 64


class ScatterClients:
    """Connects on demand. A peer that lends no slots is asked again after `retry_s`. One thread calls its methods."""

    def __init__(self, landing: LandingLimits, retry_s: float) -> None:
        self._landing = landing
        self._retry_s = retry_s
        self._watchdog = ScatterWatchdog()
        self._clients: OrderedDict[str, ScatterClient] = OrderedDict()
        self._refused_until_s: OrderedDict[str, float] = OrderedDict()

    def may_connect(self, session: str) -> bool:
        """Whether `connect` may return a client."""
        return session in self._clients or not self._refused(session)

    def connect(self, session: str, server: str, timeout_s: float) -> ScatterClient | None:
        """The stream to a peer's scatter server; None when the peer lends no slots."""
        client = self._clients.get(session)
        if client is not None and not client.broken:
            return client
        if client is not None:
            self._close(session, clean=False)
        if self._refused(session):
            return None
        try:
            client = ScatterClient(server, min(timeout_s, _ATTACH_TIMEOUT_S), self._watchdog.wake)
            self._require_equal_slots(client)
        except (TransferFailed, ValueError) as error:
            _log.info("runs to %s cannot be staged there: %s", host_of(server), error)
            self._refused_until_s[session] = time.monotonic() + self._retry_s
            if len(self._refused_until_s) > _CLIENT_LIMIT:
                self._refused_until_s.popitem(last=False)
            return None
        self._clients[session] = client
        self._watchdog.add(client)
        if len(self._clients) > _CLIENT_LIMIT:
            self._close_idle_cleanly(next(iter(self._clients)))
        return client

    def close(self) -> None:
        """Ends every stream."""
        for session in list(self._clients):
            self._close_idle_cleanly(session)
        self._watchdog.close()

    def _refused(self, session: str) -> bool:
        return self._refused_until_s.get(session, 0.0) > time.monotonic()

    def _require_equal_slots(self, client: ScatterClient) -> None:
        ours, theirs = self._landing, client.landing
        if (theirs.slot_bytes, theirs.slot_count) != (ours.slot_bytes, ours.slots):
            client.close(clean=True)
            raise TransferFailed("the peer's slots are not like ours")

    def _close_idle_cleanly(self, session: str) -> None:
        self._close(session, clean=self._clients[session].first_deadline_s is None)

    def _close(self, session: str, *, clean: bool) -> None:
        client = self._clients.pop(session)
        self._watchdog.discard(client)
        client.close(clean=clean)
