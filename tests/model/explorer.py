"""Runs worlds: the usual course, every course with a few deviations from it, and random ones."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.model.faults import possible_faults
from tests.model.fingerprint import fingerprint
from tests.model.ground import Action, Settings, Violation
from tests.model.world import World

STEPS_MAX = 2000
END_S = 1000.0 + 160.0


@dataclass(frozen=True, slots=True)
class Course:
    """What was done against the usual, by step: the number of another choice, or of a fault behind those."""

    deviations: tuple[tuple[int, int], ...] = ()


@dataclass(slots=True)
class Outcome:
    """How a course went. `log` has the name of every action; `widths` how many there were to choose from."""

    log: list[str] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)
    violation: Violation | None = None
    known: bool = False
    """Whether it was given up, because it came to a moment that another course had come to."""


@dataclass(slots=True)
class Search:
    """What an exploration has seen. `violations` are by course, shortest first."""

    runs: int = 0
    given_up: int = 0
    violations: list[tuple[Course, Outcome]] = field(default_factory=list)


def run(
    settings: Settings, course: Course, seen: set[int] | None = None, *, widths: bool = True
) -> Outcome:
    """One course to its end. With `seen`, it is given up at a moment that was seen after the last deviation.

    While only time passes, nothing is chosen against the usual: `widths` are 1 there.
    """
    outcome = Outcome()
    deviations = dict(course.deviations)
    last = max(deviations, default=-1)
    with bugs_noted(outcome):
        world = World(settings)
        try:
            while not world.at_rest and world.timers.time() < END_S:
                number = len(outcome.log)
                if number >= STEPS_MAX:
                    raise Violation("the world does not come to rest")
                choices = world.choices()
                actions: list[Action] = choices
                if number > last and widths:
                    idle = choices[0][0] == "wait" and outcome.log[-1:] == ["wait"]
                    outcome.widths.append(1 if idle else len(choices) + len(possible_faults(world)))
                elif number in deviations:
                    actions = [*choices, *possible_faults(world)]
                chosen = deviations.get(number, 0)
                name, act = actions[chosen]
                outcome.log.append(name)
                act()
                world.note_ends()
                world.check_bounds()
                if number == last and seen is not None:
                    mark = hash(fingerprint(world))
                    if mark in seen:
                        outcome.known = True
                        return outcome
                    seen.add(mark)
            world.check_rest()
        except Violation as violation:
            outcome.violation = violation
    return outcome


def explore(
    settings: Settings, deviations: int, *, stop_at_first: bool = False, every: int = 1
) -> Search:
    """Every course with at most so many deviations, but for those that meet again.

    Of the courses with all of them, only one in `every` is taken.
    """
    search = Search()
    level = [Course()]
    for depth in range(deviations + 1):
        seen: set[int] = set()
        following: list[Course] = []
        for course in level:
            outcome = run(settings, course, seen, widths=depth < deviations)
            search.runs += 1
            if outcome.violation is not None:
                search.violations.append((course, outcome))
                if stop_at_first:
                    return search
                continue
            if outcome.known:
                search.given_up += 1
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


def wander(settings: Settings, seed: int, faults: int) -> Outcome:
    """A course in which every step is drawn, with about so many faults."""
    generator = random.Random(seed)
    outcome = Outcome()
    with bugs_noted(outcome):
        world = World(settings)
        try:
            while not world.at_rest and world.timers.time() < END_S:
                if len(outcome.log) >= STEPS_MAX:
                    raise Violation("the world does not come to rest")
                choices = world.choices()
                possible = possible_faults(world) if faults and generator.random() < 0.15 else []
                if possible:
                    faults -= 1
                    name, act = generator.choice(possible)
                elif generator.random() < 0.5:
                    name, act = choices[0]
                else:
                    name, act = generator.choice(choices)
                outcome.log.append(name)
                act()
                world.note_ends()
                world.check_bounds()
            world.check_rest()
        except Violation as violation:
            outcome.violation = violation
    return outcome


@contextmanager
def bugs_noted(outcome: Outcome) -> Iterator[None]:
    """What the product logs as a bug of its own is a violation."""

    class Bugs(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            outcome.violation = outcome.violation or Violation(record.getMessage())

    logger = logging.getLogger("headrace_kv")
    handler, before, propagates = Bugs(logging.ERROR), logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.ERROR)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
        logger.propagate = propagates
