"""The bounds on each caller of a client listener: calls in flight, unary and rejected calls, and turns of work.

A caller is a tenant, or where no API key is known, a host.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final, TypeVar

from headrace_common.access.recheck import rechecked
from headrace_common.callers.rates import RateByCaller
from headrace_common.callers.turns import FairTurns
from headrace_common.client_config import ClientFacingConfig
from headrace_common.errors import (
    HeadraceError,
    InvalidRequest,
    PermissionDenied,
    QueueFull,
    Unauthenticated,
)

REFUSED_CALLS: Final = "calls in flight"
REFUSED_REJECTIONS: Final = "rejected calls"
REFUSED_UNARY: Final = "unary calls"
REFUSED_BODY: Final = "late request"
REFUSED_KEY: Final = "removed key"

# A refused call waits so long, which slows a caller that repeats it at once.
_REFUSAL_WAIT_S: Final = 1.0
# Calls of one caller that wait so. Beyond them, calls are refused at once.
_REFUSALS_WAITING_MAX: Final = 64
# The same for all callers together. An attacker may have many hosts.
_REFUSALS_WAITING_IN_ALL_MAX: Final = 1_024
# Refusals at once that a host may cause, a second and at first. Beyond them it is blocked.
_FLOOD_PER_S: Final = 500.0
_FLOOD_BURST: Final = 1_000.0
_BURST_S: Final = 2.0
# A rejected call counts once more for so many bytes of its request, and for so many seconds of its checks.
_BYTES_PER_REJECTION: Final = 256 * 1024
_CHECK_S_PER_REJECTION: Final = 0.001
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class CallerLimits:
    """`calls_max` bounds a caller's calls in flight, `rejected_per_s` its invalid ones, `unary_per_s` its unary ones.

    The API key of an open call is looked up again every `check_s`.
    """

    calls_max: int
    rejected_per_s: float
    check_s: float
    unary_per_s: float = math.inf

    @classmethod
    def from_config(cls, config: ClientFacingConfig) -> CallerLimits:
        """The limits of the settings."""
        return cls(
            config.max_calls_per_caller,
            config.max_rejected_per_s,
            config.credential_check_s,
            config.max_unary_per_s,
        )


@dataclass(slots=True)
class _OpenCall:
    """`weight` is what the call counts if it is rejected."""

    caller: str
    host: str
    weight: float = 1.0

    def add_weight(self, more: float) -> None:
        """Lets the call count more."""
        self.weight += more


_CALL: Final = ContextVar[_OpenCall | None]("open call", default=None)


def _ignore_refusal(reason: str, count: int) -> None:
    pass


class CallerBounds:
    """One event loop owns it. Every client listener of a process shares it.

    `count_refused` gets a reason, such as `REFUSED_CALLS`, and a number of calls or connections.
    """

    def __init__(
        self,
        limits: CallerLimits,
        count_refused: Callable[[str, int], None] = _ignore_refusal,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self.count_refused = count_refused
        self._on_flood: list[Callable[[str], None]] = []
        self._limits = limits
        self._cpu_clock = cpu_clock
        self._rejected = RateByCaller(
            limits.rejected_per_s, max(1.0, _BURST_S * limits.rejected_per_s), clock
        )
        self._unary = RateByCaller(
            limits.unary_per_s, max(1.0, _BURST_S * limits.unary_per_s), clock
        )
        self._floods = RateByCaller(_FLOOD_PER_S, _FLOOD_BURST, clock)
        self._calls: Counter[str] = Counter()
        self._waiting: Counter[str] = Counter()
        """Refused calls that wait, of each caller."""
        self._callers_of: dict[str, Counter[str]] = {}
        """Calls in flight of each caller, by host."""
        self._calls_in_flight = 0
        # Calls of one caller take turns too. Work for all of them in one iteration would delay the first answer until
        # the last request is routed.
        self._turns = FairTurns(lambda: self._calls_in_flight <= 1)

    def report_floods(self, on_flood: Callable[[str], None]) -> None:
        """Lets `on_flood` be called with the host of a flood, if no other caller has calls in flight from there.

        Each listener has one.
        """
        self._on_flood.append(on_flood)

    def calls(self, caller: str) -> int:
        """Calls in flight of a caller."""
        return self._calls[caller]

    @contextmanager
    def call(self, caller: str, host: str) -> Iterator[None]:
        """Counts a call while the block runs, and whether the block rejects it.

        Raises QueueFull for one that exceeds the caller's calls in flight.
        """
        if self._calls[caller] >= self._limits.calls_max:
            self._refuse_at_once(REFUSED_CALLS, caller, host)
            raise QueueFull(
                f"{self._limits.calls_max} calls of this caller are in flight; wait for one to end",
                metadata={"queue": "calls", "maxsize": str(self._limits.calls_max)},
            )
        opened = _OpenCall(caller, host)
        _CALL.set(opened)
        self._calls[caller] += 1
        self._calls_in_flight += 1
        callers = self._callers_of.setdefault(host, Counter())
        callers[caller] += 1
        try:
            yield
        except (InvalidRequest, Unauthenticated, PermissionDenied):
            self._rejected.count(caller, opened.weight)
            raise
        finally:
            self._calls_in_flight -= 1
            _remove_one(self._calls, caller)
            _remove_one(callers, caller)
            if not callers:
                self._callers_of.pop(host, None)

    def count_unary(self) -> None:
        """Counts the current call as one with a single response. Call it inside `call`.

        Raises QueueFull when the caller makes too many of them. One that is refused does not count.
        """
        opened = _CALL.get()
        if opened is None:
            return
        retry_after_s = self._unary.excess_s(opened.caller)
        if not retry_after_s:
            self._unary.count(opened.caller)
            return
        self._refuse_at_once(REFUSED_UNARY, opened.caller, opened.host)
        raise QueueFull(
            f"this caller makes more than {self._limits.unary_per_s:g} unary calls a second; wait",
            metadata={"queue": "unary calls", "maxsize": f"{self._limits.unary_per_s:g}"},
            retry_after_s=max(0.1, retry_after_s),
        )

    def count_rejection(self) -> None:
        """Counts that the current call is rejected, if `call` does not know its error. Call it inside `call`."""
        opened = _CALL.get()
        if opened is not None:
            self._rejected.count(opened.caller, opened.weight)

    def add_bytes(self, count: int) -> None:
        """Lets the current call count more if it is rejected: so many bytes of its request have arrived."""
        opened = _CALL.get()
        if opened is not None:
            opened.add_weight(count / _BYTES_PER_REJECTION)

    def add_check_s(self, seconds: float) -> None:
        """Lets the current call count more if it is rejected: its checks took so long, in any thread."""
        opened = _CALL.get()
        if opened is not None:
            opened.add_weight(seconds / _CHECK_S_PER_REJECTION)

    def timed(self, check: Callable[[], Result]) -> Result:
        """The result of a check. Its time lets the current call count more if it is rejected."""
        opened = _CALL.get()
        if opened is None:
            return check()
        start_s = self._cpu_clock()
        try:
            return check()
        finally:
            self.add_check_s(self._cpu_clock() - start_s)

    async def pace(self, caller: str, host: str) -> None:
        """Raises QueueFull after a wait when too many calls of the caller were rejected. Call it inside `call`."""
        if not self._rejected.excess_s(caller):
            return
        if (
            self._waiting[caller] >= _REFUSALS_WAITING_MAX
            or self._waiting.total() >= _REFUSALS_WAITING_IN_ALL_MAX
        ):
            self._refuse_at_once(REFUSED_REJECTIONS, caller, host)
        else:
            self.count_refused(REFUSED_REJECTIONS, 1)
            self._waiting[caller] += 1
            try:
                await asyncio.sleep(_REFUSAL_WAIT_S)
            finally:
                _remove_one(self._waiting, caller)
        raise _too_many_rejected(self._limits.rejected_per_s, self._rejected.excess_s(caller))

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
        async with rechecked(check, self._limits.check_s):
            yield

    async def wait_turn(self) -> None:
        """Waits until the caller may do expensive work, up to the next wait. Outside `call` it is no wait."""
        opened = _CALL.get()
        if opened is not None:
            await self._turns.wait(opened.caller)

    def _refuse_at_once(self, reason: str, caller: str, host: str) -> None:
        self.count_refused(reason, 1)
        self._floods.count(host)
        alone = self._callers_of.get(host, {}).keys() <= {caller}
        if alone and self._floods.excess_s(host):
            for on_flood in self._on_flood:
                on_flood(host)


def _too_many_rejected(per_s: float, retry_after_s: float) -> HeadraceError:
    return QueueFull(
        f"more than {per_s:g} calls a second of this caller were rejected; correct them, and wait",
        metadata={"queue": "rejections", "maxsize": f"{per_s:g}"},
        retry_after_s=max(0.1, retry_after_s),
    )


def _remove_one(counter: Counter[str], name: str) -> None:
    counter[name] -= 1
    if not counter[name]:
        del counter[name]
