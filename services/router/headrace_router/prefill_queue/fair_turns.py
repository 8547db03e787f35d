"""Which class, and which tenant of it, is served next: start-time fair queueing, by weights, in prompt tokens. Pure.

Each claimant has a start tag. A task that is handed out moves the tag of its claimant by the task's tokens divided by
the weight. The claimant with the smallest tag is next. A claimant that had no task gets at least the tag of the task
that was handed out last. So it has no advantage from its pause. When no claimant has a task, all tags are equal again.

Every claimant gets its part of the tokens while it has tasks. Between two tasks of a claimant, another one gets at most
one task, and the first task's tokens times the ratio of the weights. (P. Goyal, H. M. Vin, H. Cheng, "Start-time fair
queuing", 1996.)
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

Claimant = TypeVar("Claimant", bound=Hashable)


class FairTurns(Generic[Claimant]):
    """The start tags of the claimants of one queue. `weight` returns the current weight of a claimant."""

    def __init__(self, weight: Callable[[Claimant], float]) -> None:
        self._weight = weight
        self._starts: dict[Claimant, float] = {}
        self._busy: dict[Claimant, float] = {}
        """The claimants with tasks, and the weight of each when it got the first of them."""
        self._busy_weight = 0.0
        self._now = 0.0
        """The tag of the last task that was handed out."""
        self._end = 0.0
        """The largest tag."""

    def start(self, claimant: Claimant) -> float:
        """The tag of a claimant with tasks. The one with the smallest is next."""
        return self._starts[claimant]

    def became_busy(self, claimant: Claimant) -> None:
        """A claimant that had no task has one."""
        if not self._busy:
            self._now = self._end
            self._starts.clear()
        self._starts[claimant] = max(self._starts.get(claimant, 0.0), self._now)
        self._busy[claimant] = self._weight(claimant)
        self._busy_weight += self._busy[claimant]

    def became_idle(self, claimant: Claimant) -> None:
        """A claimant has no task any more."""
        self._busy_weight -= self._busy.pop(claimant)

    def handed_out(self, claimant: Claimant, tokens: int) -> None:
        """A task of so many tokens to compute was handed out."""
        start = self._starts.get(claimant, self._now)
        self._now = max(self._now, start)
        self._move(claimant, start + max(1, tokens) / self._weight(claimant))

    def corrected(self, claimant: Claimant, tokens: int) -> None:
        """A task that was handed out took so many tokens more, or fewer if negative."""
        start = self._starts.get(claimant, self._now)
        self._move(claimant, max(start + tokens / self._weight(claimant), min(start, self._now)))

    def others_weight(self, claimant: Claimant) -> float:
        """The weight of all other claimants with tasks."""
        return max(0.0, self._busy_weight - self._busy.get(claimant, 0.0))

    def _move(self, claimant: Claimant, start: float) -> None:
        self._starts[claimant] = start
        self._end = max(self._end, start)


def amount_ahead(own: float, weight: float, others: Iterable[tuple[float, float]]) -> float:
    """What is handed out before the end of `own` of a claimant: `own` itself, and the shares of the others.

    `others` are the amount, in the same unit, and the weight of other claimants. None gets more than it has.
    """
    per_weight = own / weight
    return own + sum(min(amount, per_weight * other) for amount, other in others)
