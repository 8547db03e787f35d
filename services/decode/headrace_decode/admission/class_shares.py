"""Shares of a worker's slots or blocks among classes of requests, while not all find room. Pure but for the clock.

A class that was refused for want of room sends the request again after a pause. Until then, room goes to other classes
only up to the same use for their weights: else small requests of one class would take each piece of room at once, and
a large request of another class would never find enough. A class that uses nothing may always take room, so each class
has a request on the worker in turn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headrace_common.callers.priority import Priority


@dataclass(frozen=True, slots=True)
class _Refused:
    """The smallest request of a class that was refused, until its caller has had time to send it again."""

    amount: int
    until_s: float


class ClassShares:
    """The use of one resource by class, and the classes that wait for it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._used = dict.fromkeys(Priority, 0)
        self._refused: dict[Priority, _Refused] = {}

    def used_by(self, priority: Priority) -> int:
        """The amount that a class uses."""
        return self._used[priority]

    def refused(self, priority: Priority, amount: int, retry_s: float) -> None:
        """There was no room for `amount`. The caller sends the request again within `retry_s`."""
        before = self._waiting(priority)
        smallest = amount if before is None else min(amount, before.amount)
        self._refused[priority] = _Refused(smallest, self._clock() + retry_s)

    def kept_for(self, priority: Priority, amount: int) -> Priority | None:
        """The class that the room is kept for. None when `priority` may take `amount` of it."""
        if not self._used[priority]:
            return None
        own = (self._used[priority] + amount) / priority.weight
        for other in Priority:
            waiting = self._waiting(other) if other is not priority else None
            if waiting and own > (self._used[other] + waiting.amount) / other.weight:
                return other
        return None

    def take(self, priority: Priority, amount: int) -> None:
        """A request of a class was admitted."""
        self._used[priority] += amount
        self._refused.pop(priority, None)

    def give_back(self, priority: Priority, amount: int) -> None:
        """An admitted request has ended."""
        self._used[priority] -= amount

    def _waiting(self, priority: Priority) -> _Refused | None:
        refused = self._refused.get(priority)
        return refused if refused is not None and self._clock() < refused.until_s else None
