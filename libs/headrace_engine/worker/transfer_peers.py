"""The hosts that may connect to this worker's transports: those of ranks with a handoff stream."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from headrace_common.errors import HeadraceError, InternalError
from headrace_common.tasks import end_task
from headrace_kv.transport.guard import Address, Networks, merge_networks, networks_of

_LOG = logging.getLogger(__name__)

_APPLY_TIMEOUT_S = 5.0


class TransferPeers:
    """Admits the addresses of open streams, and `always`. `apply` replaces the networks of the engine's transports.

    An address stays admitted for `linger_s` after its last stream, in which the stream may return. Then its connections
    end too.
    """

    def __init__(
        self, apply: Callable[[Networks], Awaitable[None]], always: Networks, linger_s: float
    ) -> None:
        self._apply = apply
        self._always = always
        self._linger_s = linger_s
        self._streams: Counter[Address] = Counter()
        self._timers: dict[Address, asyncio.TimerHandle] = {}
        # The engine starts with `always`.
        self._applied: frozenset[Address] = frozenset()
        self._updating: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def admitted(self, addresses: frozenset[Address]) -> AsyncIterator[None]:
        """Within this context the transport admits the addresses. Raises what `apply` raises, or InternalError."""
        for address in addresses:
            self._streams[address] += 1
            timer = self._timers.pop(address, None)
            if timer is not None:
                timer.cancel()
        try:
            await self._wait_applied(addresses)
            yield
        finally:
            for address in addresses:
                self._streams[address] -= 1
                if not self._streams[address]:
                    del self._streams[address]
                    loop = asyncio.get_running_loop()
                    self._timers[address] = loop.call_later(self._linger_s, self._expire, address)

    async def close(self) -> None:
        """Changes nothing any more."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        await end_task(self._updating)

    async def _wait_applied(self, addresses: frozenset[Address]) -> None:
        try:
            async with asyncio.timeout(_APPLY_TIMEOUT_S):
                while not addresses <= self._applied:
                    await asyncio.shield(self._update())
        except TimeoutError:
            raise InternalError(
                f"the transport did not admit {', '.join(map(str, addresses))} within {_APPLY_TIMEOUT_S:g} s"
            ) from None

    def _expire(self, address: Address) -> None:
        del self._timers[address]
        self._update().add_done_callback(_log_failure)

    def _update(self) -> asyncio.Task[None]:
        """The task that brings the transports up to date. There is one at a time, so no update overtakes another."""
        if self._updating is None or self._updating.done():
            self._updating = asyncio.create_task(self._run(), name="transfer peers")
        return self._updating

    async def _run(self) -> None:
        while (wanted := frozenset((*self._streams, *self._timers))) != self._applied:
            await self._apply(merge_networks((*self._always, *networks_of(wanted))))
            for address in wanted ^ self._applied:
                verb = "admits" if address in wanted else "no longer admits"
                _LOG.info("the KV transport %s connections from %s", verb, address)
            self._applied = wanted


def _log_failure(update: asyncio.Task[None]) -> None:
    if update.cancelled():
        return
    error = update.exception()
    if isinstance(error, HeadraceError):
        _LOG.error("cannot withdraw a host from the KV transport: %s", error.detail)
    elif error is not None:
        _LOG.error("withdrawing a host from the KV transport met a bug", exc_info=error)
