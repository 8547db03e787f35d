"""Who is let in: a bound on requests and on prompt tokens that wait, fair among tenants.

A refusal comes before any work is done for the request, and says when to come again by how fast requests end here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from headrace_common.deadlines import Deadline
from headrace_common.errors import DeadlineExceeded, HeadraceError, InvalidRequest, QueueFull
from headrace_router.admission.fair_share import CapacityRequest, FairPool, Grant
from headrace_router.admission.tenants import DEFAULT_TENANT

_RETRY_MIN_S: Final = 0.05
_RETRY_MAX_S: Final = 60.0
_RETRY_UNKNOWN_S: Final = 0.5
# How much of the mean hold time the latest one makes up.
_HOLD_SHARE: Final = 0.1


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """`max_queued_tokens` bounds the prompt tokens of requests whose first token has not come. `wait_s` is how long a
    tenant below its share may wait for one that is above to end.
    """

    max_num_seqs: int
    max_queued_tokens: int
    wait_s: float


class _Gate:
    """One bounded resource: waits for room, and knows how long it is held."""

    def __init__(self, name: str, unit: str, pool: FairPool, wait_s: float) -> None:
        self.pool = pool
        self._name = name
        self._unit = unit
        self._wait_s = wait_s
        self._mean_hold_s = 0.0

    @property
    def full(self) -> bool:
        return self.pool.used >= self.pool.capacity

    async def enter(self, tenant: str, amount: int, deadline: Deadline) -> None:
        granted = asyncio.Event()
        claim = CapacityRequest(tenant, amount, granted.set)
        answer = self.pool.ask(claim)
        if answer is Grant.REFUSED:
            raise self._refusal(tenant, amount)
        if answer is Grant.TAKEN:
            return
        wait_s = min(self._wait_s, deadline.remaining_s())
        try:
            async with asyncio.timeout(wait_s):
                await granted.wait()
        except TimeoutError:
            if self.pool.withdraw(claim):
                raise self._gave_up(tenant, amount, wait_s) from None
        except asyncio.CancelledError:
            if not self.pool.withdraw(claim):
                self.pool.give_back(tenant, amount)
            raise

    def _gave_up(self, tenant: str, amount: int, waited_s: float) -> HeadraceError:
        if waited_s >= self._wait_s:
            return self._refusal(tenant, amount)
        what = f"room for {amount} {self._unit}"
        return DeadlineExceeded(
            f"the deadline passed while waiting for {what}", metadata={"waited_for": what}
        )

    def leave(self, tenant: str, amount: int, held_s: float) -> None:
        share = _HOLD_SHARE if self._mean_hold_s else 1.0
        self._mean_hold_s += share * (held_s - self._mean_hold_s)
        self.pool.give_back(tenant, amount)

    def refuse_when_full(self, tenant: str) -> None:
        """Before it is known how much is asked for: a tenant above its share would not get anything anyway."""
        if self.full and self.pool.used_by(tenant) >= self.pool.share(tenant):
            raise self._refusal(tenant, 1)

    def _refusal(self, tenant: str, amount: int) -> QueueFull:
        pool = self.pool
        used, share = pool.used_by(tenant), pool.share(tenant)
        detail = f"{pool.used} of {pool.capacity} {self._unit} are in use"
        if tenant != DEFAULT_TENANT:
            detail += f", {used} of them by tenant {tenant}, whose share is {share:.0f}"
        return QueueFull(
            detail,
            metadata={
                "queue": self._name,
                "maxsize": str(pool.capacity),
                "used": str(pool.used),
                "tenant": tenant,
                "tenant_used": str(used),
                "tenant_share": f"{share:.0f}",
            },
            retry_after_s=self._retry_after_s(used, share, amount),
        )

    def _retry_after_s(self, used: int, share: float, amount: int) -> float:
        """Until as much has ended as is missing: what is held for a mean time ends evenly over that time."""
        if not self._mean_hold_s:
            return _RETRY_UNKNOWN_S
        over_share = max(0.0, used + amount - share)
        over_all = max(0, self.pool.used + amount - self.pool.capacity)
        own_s = self._mean_hold_s * over_share / used if used else 0.0
        all_s = self._mean_hold_s * over_all / max(1, self.pool.used)
        return min(_RETRY_MAX_S, max(_RETRY_MIN_S, min(own_s, self._mean_hold_s), all_s))


class AdmissionPermit:
    """A request that was let in."""

    def __init__(self, tenant: str, tokens: _Gate, deadline: Deadline) -> None:
        self.tenant = tenant
        self._gate = tokens
        self._deadline = deadline
        self._tokens = 0
        self._since_s = 0.0

    async def queue_tokens(self, count: int) -> None:
        """The prompt is known now, and is about to wait for its prefill.

        Raises QueueFull, DeadlineExceeded, or InvalidRequest for a prompt that can never be let in.
        """
        if count > self._gate.pool.capacity:
            raise InvalidRequest(
                {
                    "prompt": f"makes {count} tokens, and this router lets at most "
                    f"{self._gate.pool.capacity} wait; shorten it"
                }
            )
        await self._gate.enter(self.tenant, count, self._deadline)
        self._tokens, self._since_s = count, time.monotonic()

    def first_token(self) -> None:
        """The prompt waits no more. May be said again."""
        if self._tokens:
            tokens, self._tokens = self._tokens, 0
            self._gate.leave(self.tenant, tokens, time.monotonic() - self._since_s)


class Admission:
    """Lets requests in, each by way of a Ticket. One event loop owns it."""

    def __init__(self, limits: AdmissionLimits, weights: Callable[[], Mapping[str, float]]) -> None:
        self._requests = _Gate(
            "requests", "requests", FairPool(limits.max_num_seqs, weights), limits.wait_s
        )
        self._tokens = _Gate(
            "tokens", "queued tokens", FairPool(limits.max_queued_tokens, weights), limits.wait_s
        )

    @property
    def max_num_seqs(self) -> int:
        """Most requests that are let in."""
        return self._requests.pool.capacity

    @property
    def max_queued_tokens(self) -> int:
        """Most prompt tokens of requests whose first token has not come."""
        return self._tokens.pool.capacity

    @property
    def requests(self) -> int:
        """Requests that are in."""
        return self._requests.pool.used

    @property
    def waiting(self) -> int:
        """Requests that wait to be let in."""
        return self._requests.pool.waiting + self._tokens.pool.waiting

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens of requests whose first token has not come."""
        return self._tokens.pool.used

    async def enter(self, tenant: str, deadline: Deadline) -> AdmissionPermit:
        """Lets a request in, at the latest after the time that may be waited. `leave` must follow.

        Raises QueueFull with an estimate of when to come again, or DeadlineExceeded.
        """
        self._tokens.refuse_when_full(tenant)
        await self._requests.enter(tenant, 1, deadline)
        return AdmissionPermit(tenant, self._tokens, deadline)

    def leave(self, ticket: AdmissionPermit, held_s: float) -> None:
        """The request has ended after `held_s`."""
        ticket.first_token()
        self._requests.leave(ticket.tenant, 1, held_s)

    @contextmanager
    def holding(self, ticket: AdmissionPermit) -> Iterator[AdmissionPermit]:
        """Holds a ticket until the block ends."""
        entered_s = time.monotonic()
        try:
            yield ticket
        finally:
            self.leave(ticket, time.monotonic() - entered_s)
