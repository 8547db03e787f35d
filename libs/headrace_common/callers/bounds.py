"""The bounds on each caller of a client listener: calls in flight, and turns of work.

A caller is a tenant, or where no API key is known, a host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from typing import Final

from headrace_common.access.authorizer import CREDENTIAL_CHECK_S, rechecked
from headrace_common.callers.turns import FairTurns
from headrace_common.errors import QueueFull, Unauthenticated

REFUSED_CALLS: Final = "calls in flight"
REFUSED_BODY: Final = "late request"
REFUSED_KEY: Final = "removed key"


_CALLER: Final = ContextVar[str]("caller", default="")


def _ignore_refusal(reason: str, count: int) -> None:
    pass


class CallerBounds:
    """One event loop owns it. Every client listener of a process shares it.

    `calls_max` bounds a caller's calls in flight. `count_refused` gets a reason, such as `REFUSED_CALLS`, and a number
    of calls. The API key of an open call is looked up again every `check_s`.
    """

    def __init__(
        self,
        calls_max: int = 2_048,
        count_refused: Callable[[str, int], None] = _ignore_refusal,
        *,
        check_s: float = CREDENTIAL_CHECK_S,
    ) -> None:
        self.count_refused = count_refused
        self._calls_max = calls_max
        self._check_s = check_s
        self._calls: Counter[str] = Counter()
        # Calls of one caller take turns too. Work for all of them in one iteration would delay the first answer until
        # the last request is routed.
        self._turns = FairTurns(lambda: self._calls.total() <= 1)

    def calls(self, caller: str) -> int:
        """Calls in flight of a caller."""
        return self._calls[caller]

    @contextmanager
    def call(self, caller: str) -> Iterator[None]:
        """Counts a call while the block runs. Raises QueueFull for one that exceeds the caller's calls in flight."""
        if self._calls[caller] >= self._calls_max:
            self.count_refused(REFUSED_CALLS, 1)
            raise QueueFull(
                f"{self._calls_max} calls of this caller are in flight; wait for one to end, or raise "
                "max_concurrent_requests",
                metadata={"queue": "calls", "maxsize": str(self._calls_max)},
            )
        _CALLER.set(caller)
        self._calls[caller] += 1
        try:
            yield
        finally:
            self._calls[caller] -= 1
            if not self._calls[caller]:
                del self._calls[caller]

    @asynccontextmanager
    async def rechecked(self, tenant_now: Callable[[], str], tenant: str) -> AsyncIterator[None]:
        """Ends the block with Unauthenticated once `tenant_now` does not return the tenant of the call any more."""

        def check() -> None:
            if tenant_now() != tenant:
                self.count_refused(REFUSED_KEY, 1)
                raise Unauthenticated(
                    "the API key was removed while its request ran; use another key"
                )

        if not tenant:
            yield
            return
        async with rechecked(check, self._check_s):
            yield

    async def wait_turn(self) -> None:
        """Waits until the caller may do expensive work, up to the next wait. Outside `call` it is no wait."""
        caller = _CALLER.get()
        if caller:
            await self._turns.wait(caller)
