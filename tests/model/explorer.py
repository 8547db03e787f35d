"""Runs worlds: the usual course, every course with a few deviations from it, and random courses."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from tests.model.ground import Action, Violation

STEPS_MAX = 2000
END_S = 1000.0 + 160.0


class World(Protocol):
    """Everything as it follows from steps, one at a time."""

    @property
    def now_s(self) -> float: ...

    @property
    def at_rest(self) -> bool: ...

    def choices(self) -> list[Action]:
        """The possible steps, the usual one first."""

    def faults(self) -> list[Action]:
        """The faults that are possible now."""

    def check_step(self) -> None:
        """Raises Violation."""

    def check_rest(self) -> None:
        """Raises Violation, at the end."""

    def mark(self) -> object:
        """Equal for states from which the same may follow."""

    def close(self) -> None: ...


NewWorld = Callable[[], World]


@dataclass(frozen=True, slots=True)
class Course:
    """Deviations from the usual course: (step, index of the action), where faults follow the ordinary choices."""

    deviations: tuple[tuple[int, int], ...] = ()


@dataclass(slots=True)
class Outcome:
    """The result of a course. `log` has the name of every action, `widths` the number of actions to choose from."""

    log: list[str] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)
    violation: Violation | None = None
    known: bool = False
    """Whether the course was abandoned because it reached a state that another course had reached."""


@dataclass(slots=True)
class Search:
    """The result of an exploration. `violations` come in the order of their courses' length."""

    runs: int = 0
    abandoned: int = 0
    violations: list[tuple[Course, Outcome]] = field(default_factory=list)


def run(
    new_world: NewWorld, course: Course, seen: set[int] | None = None, *, widths: bool = True
) -> Outcome:
    """Runs one course. With `seen`, it is abandoned after the last deviation in a state that was seen before.

    While only time passes there are no deviations: `widths` are 1 then.
    """
    outcome = Outcome()
    deviations = dict(course.deviations)
    last = max(deviations, default=-1)
    with errors_as_violations(outcome):
        world = new_world()
        try:
            while not world.at_rest and world.now_s < END_S:
                number = len(outcome.log)
                if number >= STEPS_MAX:
                    raise Violation("the world does not come to rest")
                choices = world.choices()
                actions: list[Action] = choices
                if number > last and widths:
                    idle = choices[0][0] == "wait" and outcome.log[-1:] == ["wait"]
                    outcome.widths.append(1 if idle else len(choices) + len(world.faults()))
                elif number in deviations:
                    actions = [*choices, *world.faults()]
                chosen = deviations.get(number, 0)
                name, act = actions[chosen]
                outcome.log.append(name)
                act()
                world.check_step()
                if number == last and seen is not None:
                    mark = hash(world.mark())
                    if mark in seen:
                        outcome.known = True
                        return outcome
                    seen.add(mark)
            world.check_rest()
        except Violation as violation:
            outcome.violation = violation
        finally:
            world.close()
    return outcome


def explore(
    new_world: NewWorld, deviations: int, *, stop_at_first: bool = False, every: int = 1
) -> Search:
    """Runs every course with at most `deviations`, except those that reach a known state.

    Of the courses with all deviations, only one in `every` runs.
    """
    search = Search()
    level = [Course()]
    for depth in range(deviations + 1):
        seen: set[int] = set()
        following: list[Course] = []
        for course in level:
            outcome = run(new_world, course, seen, widths=depth < deviations)
            search.runs += 1
            if outcome.violation is not None:
                search.violations.append((course, outcome))
                if stop_at_first:
                    return search
                continue
            if outcome.known:
                search.abandoned += 1
                continue
            if depth == deviations:
                continue
            first = course.deviations[-1][0] + 1 if course.deviations else 0
            for number, width in enumerate(outcome.widths, first):
                following += [
                    Course((*course.deviations, (number, other))) for other in range(1, width)
                ]
        level = following[:: every if depth + 1 == deviations else 1]
    return search


def run_random(new_world: NewWorld, seed: int, faults: int) -> Outcome:
    """Runs a course of random steps, with at most `faults` faults."""
    generator = random.Random(seed)
    outcome = Outcome()
    with errors_as_violations(outcome):
        world = new_world()
        try:
            while not world.at_rest and world.now_s < END_S:
                if len(outcome.log) >= STEPS_MAX:
                    raise Violation("the world does not come to rest")
                choices = world.choices()
                possible = world.faults() if faults and generator.random() < 0.15 else []
                if possible:
                    faults -= 1
                    name, act = generator.choice(possible)
                elif generator.random() < 0.5:
                    name, act = choices[0]
                else:
                    name, act = generator.choice(choices)
                outcome.log.append(name)
                act()
                world.check_step()
            world.check_rest()
        except Violation as violation:
            outcome.violation = violation
        finally:
            world.close()
    return outcome


@contextmanager
def errors_as_violations(outcome: Outcome) -> Iterator[None]:
    """Turns an error in the product's log into a violation."""

    class ErrorHandler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            outcome.violation = outcome.violation or Violation(record.getMessage())

    logger = logging.getLogger("headrace_kv")
    handler, before, propagates = ErrorHandler(logging.ERROR), logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.ERROR)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
        logger.propagate = propagates
