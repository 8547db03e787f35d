"""Which class of tasks is handed out next: start-time fair queueing, by weights, in prompt tokens. Pure.

Each class has a start tag. A handed-out task moves the tag of its class by the task's tokens divided by the weight. The
class with the smallest tag is next. A class that had no task gets at least the tag of the task that was handed out
last. So it has no advantage from its pause.

Every class gets its part of the tokens while it has tasks. Between two tasks of a class, another one gets at most one
task, and the first task's tokens times the ratio of the weights. (P. Goyal, H. M. Vin, H. Cheng, "Start-time fair
queuing", 1996.)
"""

from __future__ import annotations

from collections.abc import Mapping

from headrace_common.callers.priority import Priority


class ClassTurns:
    """The start tags of the classes of one queue."""

    def __init__(self) -> None:
        self._starts = dict.fromkeys(Priority, 0.0)
        self._now = 0.0
        """The tag of the last task that was handed out."""

    def precedence(self, priority: Priority) -> tuple[float, Priority]:
        """The class with the smallest value is next. Of equal tags, that of the higher class is."""
        return self._starts[priority], priority

    def became_busy(self, priority: Priority) -> None:
        """A class that had no task has one."""
        self._starts[priority] = max(self._starts[priority], self._now)

    def handed_out(self, priority: Priority, tokens: int) -> None:
        """A task of so many prompt tokens was handed out."""
        start = self._starts[priority]
        self._now = max(self._now, start)
        self._starts[priority] = start + max(1, tokens) / priority.weight


def amount_ahead(own: float, priority: Priority, waiting: Mapping[Priority, float]) -> float:
    """What is handed out before the end of `own` of a class: `own` itself, and the shares of the other classes.

    `waiting` is what each class has, in the same unit. No class gets more than it has.
    """
    per_weight = own / priority.weight
    return own + sum(
        min(amount, per_weight * other.weight)
        for other, amount in waiting.items()
        if other is not priority
    )
