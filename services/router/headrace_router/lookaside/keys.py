"""The keys of a deployment's routers, for reservations that another router has granted."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from headrace.registry.v1 import registry_pb2
from headrace_common.errors import QueueFull
from headrace_common.tickets.keys import KeyUse, TicketKey, TicketKeys

_LOG = logging.getLogger(__name__)


class RouterKeys:
    """The key `own`, and those of the registered routers. A router's key is kept for `kept_s` after it has left."""

    def __init__(self, own: TicketKey, kept_s: float) -> None:
        self._keys = TicketKeys(kept_s)
        # Known without a registry, too.
        self._own_use = self._keys.use(own.public_key)
        self._uses: dict[bytes, KeyUse] = {}

    def update(self, members: Iterable[registry_pb2.Member]) -> None:
        """Replaces the registered routers."""
        current = {
            member.ticket_public_key
            for member in members
            if member.role == registry_pb2.Member.ROLE_ROUTER and member.ticket_public_key
        }
        for public_key in self._uses.keys() - current:
            self._uses.pop(public_key).end()
        for public_key in current - self._uses.keys():
            try:
                self._uses[public_key] = self._keys.use(public_key)
            except (ValueError, QueueFull) as error:
                _LOG.warning("the ticket key of a router is not used: %s", error)

    def find(self, key_id: bytes) -> TicketKey | None:
        """See TicketKeys."""
        return self._keys.find(key_id)
