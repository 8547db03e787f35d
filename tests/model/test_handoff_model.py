"""Explores the handoff protocol with lost, repeated and late messages, late writes and crashes.

Receiver, ledger, leases and senders are the product's own; world.py has the modelled parts. Each test at the end
removes one safeguard and shows that the exploration then finds a violation.
"""

from __future__ import annotations

import os
from collections import Counter
from functools import partial
from typing import Any

import pytest

from headrace_kv.leases import WriteLease
from headrace_kv.receive.ledger import Ledger
from tests.model.explorer import Course, NewWorld, Search, explore, run, run_random
from tests.model.ground import LEASE_S, QUIET_S, Settings
from tests.model.world import World


def sized(**sizes: float) -> NewWorld:
    return partial(World, Settings(**sizes))  # type: ignore[arg-type]


SMALL = sized()
EVERY = int(os.environ.get("HEADRACE_MODEL_EVERY", "10"))
"""Of the courses with two deviations, one in so many runs. With 1, the test takes two minutes."""


def describe(search: Search) -> str:
    """The first violations with their courses, as text."""
    return "\n".join(
        f"{outcome.violation}: {'; '.join(name for name in outcome.log if name != 'wait')}"
        for _, outcome in search.violations[:3]
    )


def test_the_usual_course_completes() -> None:
    outcome = run(sized(ranks=2, layers=2, chunks=2), Course())
    assert outcome.violation is None
    assert outcome.log.count("land 0") == 8
    assert "wait" not in outcome.log


@pytest.mark.parametrize(
    "new_world",
    [SMALL, sized(layers=2), sized(ranks=2), sized(chunks=2)],
    ids=["one key", "two layers", "two ranks", "two chunks"],
)
def test_one_deviation_at_any_step_violates_nothing(new_world: NewWorld) -> None:
    search = explore(new_world, 1)
    assert not search.violations, describe(search)
    assert search.runs > 200


@pytest.mark.timeout(300)
def test_two_deviations_at_any_steps_violate_nothing() -> None:
    search = explore(sized(retries=0), 2, every=EVERY)
    assert not search.violations, describe(search)
    assert search.runs > 10_000 / EVERY


def test_random_courses_with_many_faults_violate_nothing() -> None:
    ends: Counter[bool] = Counter()
    for seed in range(600):
        new_world = sized(
            ranks=1 + seed % 2, layers=1 + seed // 2 % 2, chunks=1 + seed // 4 % 2, retries=2
        )
        outcome = run_random(new_world, seed, faults=1 + seed % 9)
        assert outcome.violation is None, f"seed {seed}: {outcome.violation}: {outcome.log}"
        ends["wait" in outcome.log] += 1
    assert min(ends.values()) > 20


def test_a_course_can_be_repeated() -> None:
    course = Course(((6, 6),))
    assert run(SMALL, course).log == run(SMALL, course).log
    assert run_random(SMALL, 7, 4).log == run_random(SMALL, 7, 4).log


def found_without(new_world: NewWorld, deviations: int = 1) -> str:
    search = explore(new_world, deviations, stop_at_first=True)
    return describe(search)


def test_without_the_quarantine_a_foreign_write_is_found() -> None:
    assert "into block 0 of others" in found_without(sized(quarantine_s=-2 * LEASE_S))


def test_with_half_the_quarantine_a_foreign_write_is_found() -> None:
    """The quarantine has no slack: two leases and the transport's quiet time."""
    assert "of others" in found_without(sized(quarantine_s=-2 * LEASE_S + 0.5 * QUIET_S))


def test_without_the_lease_check_a_foreign_write_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WriteLease, "alive", lambda lease, now_s: True)
    monkeypatch.setattr(WriteLease, "remaining_s", lambda lease, now_s: LEASE_S)
    # A sender that gives up an unanswered Open does not reach the write, with one deviation.
    monkeypatch.setattr("headrace_kv.send.writes.ANSWER_WAIT_MAX_S", 1e9)
    assert "of others" in found_without(SMALL)


class CountingLedger(Ledger):
    """Counts acknowledgements instead of keys."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._expected = len(self.missing_keys)
        self._count = 0

    def land(self, *arguments: Any) -> bool:
        landed = super().land(*arguments)
        self._count += 1
        return landed

    @property
    def complete(self) -> bool:
        return self._count >= self._expected


@pytest.mark.parametrize("new_world", [sized(layers=2), sized(ranks=2)])
def test_without_the_ledgers_set_a_missing_key_is_found(
    new_world: NewWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace_kv.receive.transfer.Ledger", CountingLedger)
    assert "have not landed" in found_without(new_world)


def test_without_the_quiet_time_a_late_write_is_found() -> None:
    found = found_without(sized(quiet_after_failure_s=0.0))
    assert "of others" in found or "is quiet, but" in found
