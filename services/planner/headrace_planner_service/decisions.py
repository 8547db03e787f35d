"""The last decisions of a planner, and what became of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from headrace_planner.observation import Decision


class Outcome(StrEnum):
    """What became of a decision. planner.proto describes the values."""

    KEEP = "keep"
    CHANGING = "changing"
    INCOMPLETE = "incomplete"
    ADVISED = "advised"
    PUBLISHED = "published"
    APPLIED = "applied"
    FAILED = "failed"
    EXPIRED = "expired"


@dataclass(frozen=True, slots=True)
class DecisionEntry:
    """One decision at the end of an interval. `number` counts from 1."""

    number: int
    start_unix_s: float
    duration_s: float
    decision: Decision
    outcome: Outcome
    detail: str = ""

    @property
    def text(self) -> str:
        """The decision with its reasons, for logs."""
        current, target = self.decision.current, self.decision.target
        line = f"{current.prefill} P, {current.decode} D"
        if self.decision.is_change:
            line += f" -> {target.prefill} P, {target.decode} D"
        sentences = [reason.sentence for reason in self.decision.reasons]
        return " ".join([f"{line} ({self.outcome})", *filter(None, [self.detail]), *sentences])


class DecisionLog:
    """Keeps the last decisions, at most `count`."""

    def __init__(self, count: int) -> None:
        self._entries: deque[DecisionEntry] = deque(maxlen=count)
        self._number = 0

    @property
    def next_number(self) -> int:
        """The number of the next decision."""
        return self._number + 1

    @property
    def newest(self) -> DecisionEntry | None:
        """The last decision."""
        return self._entries[-1] if self._entries else None

    def add(self, entry: DecisionEntry) -> DecisionEntry:
        """Keeps a decision with the next number, and returns it."""
        self._number = entry.number
        self._entries.append(entry)
        return entry

    def set_outcome(self, number: int, outcome: Outcome, detail: str = "") -> DecisionEntry | None:
        """Records what became of a decision. Returns it, or None where it is no longer kept."""
        for index, entry in enumerate(self._entries):
            if entry.number == number:
                self._entries[index] = replace(entry, outcome=outcome, detail=detail)
                return self._entries[index]
        return None

    def page(self, before: int, count: int) -> Sequence[DecisionEntry]:
        """Up to `count` decisions with smaller numbers than `before`, newest first. 0 means from the newest."""
        found = [entry for entry in reversed(self._entries) if not before or entry.number < before]
        return found[:count]
