"""Explores the move of an answer with workers and routers that end, late messages and clients that leave.

Routers are the product's own; moves.py has the modelled parts. Some tests remove one safeguard each, and show that the
exploration then finds a violation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from headrace.inference.v1 import sampling_pb2
from headrace_common.errors import (
    DecodeFull,
    HeadraceError,
    ProtocolViolation,
    TransferFailed,
    TransferTimeout,
)
from headrace_router.dispatch.attempt import Attempt
from tests.model.explorer import Course, explore, run, run_random
from tests.model.ground import Violation
from tests.model.moves import MoveWorld
from tests.model.test_handoff_model import EVERY, describe

AHEADS = (100, 3)
"""The source waits for the target, or has tokens that are held."""


def test_the_usual_course_moves_the_answer() -> None:
    outcome = run(MoveWorld, Course())
    assert outcome.violation is None
    assert outcome.log.count("send KV from d0") == 1
    assert "token of router-0 2 on d1" in outcome.log
    assert "wait" not in outcome.log
    other = Course(((12, 1),))
    assert run(MoveWorld, other).log == run(MoveWorld, other).log


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ahead", AHEADS)
def test_one_deviation_at_any_step_violates_nothing(ahead: int) -> None:
    search = explore(partial(MoveWorld, ahead, 2), 1)
    assert not search.violations, describe(search)
    assert search.runs > 300


@pytest.mark.timeout(300)
def test_random_courses_with_many_faults_violate_nothing() -> None:
    for seed in range(3_000 // EVERY):
        new_world = partial(MoveWorld, AHEADS[seed % 2], 1 + seed // 2 % 2)
        outcome = run_random(new_world, seed, faults=seed % 6)
        assert outcome.violation is None, f"seed {seed}: {outcome.violation}: {outcome.log}"


def end_as_the_target_begins() -> None:
    """The source's end and the target's first token arrive in one turn of the router's event loop."""
    world = MoveWorld()

    def step(wanted: str) -> None:
        act = next(act for name, act in world.choices() if wanted in name)
        act()
        world.check_step()

    while "token of router-0 2 on d1" not in world.choices()[0][0]:
        step("")
    step("")
    while any("token of router-0 1 on d0" in name for name, _ in world.choices()):
        step("token of router-0 1 on d0")
        step("deliver 0 to router")
    step("finish router-0 1 on d0")
    step("deliver all")
    while not world.at_rest:
        step("")
    world.check_rest()
    world.close()


def test_a_source_that_ends_as_the_target_begins_has_the_answer() -> None:
    end_as_the_target_begins()


@pytest.mark.parametrize("error", [ProtocolViolation, TransferFailed, TransferTimeout])
def test_the_target_computes_kv_that_does_not_arrive(error: type[HeadraceError]) -> None:
    """As when the target has lost the message of the landed layers, and the source has ended."""
    world = MoveWorld()
    source, target = world.workers.values()
    while not source.sending:
        world.choices()[0][1]()
    world.loop.settle(partial(source.end_sending, source.sending[0], refused=False))
    require_moved_after(world, target.requests[0], error("as modelled"))


def test_a_target_that_is_full_at_the_switch_is_asked_again() -> None:
    """It may have the place of the warm request still."""
    world = MoveWorld()
    target = world.workers["d1"]
    while not (found := [one for one in target.requests if one.call.generated_token_count]):
        world.choices()[0][1]()
    require_moved_after(world, found[0], DecodeFull("as modelled"))


def require_moved_after(world: MoveWorld, request: Any, error: HeadraceError) -> None:
    """The target fails with a request. Then the source generates nothing."""
    world.loop.settle(partial(world.workers["d1"].fail, request, error))
    while not world.at_rest:
        next(act for name, act in world.choices() if not name.endswith("on d0"))()
        world.check_step()
    world.check_rest()
    assert world.last is not None
    assert world.last.timing.decode_worker_id == "d1"
    world.close()


def _found(ahead: int) -> str:
    return describe(explore(partial(MoveWorld, ahead, 2), 1, stop_at_first=True))


def give_held_ones(attempt: Attempt, successor: Attempt) -> None:
    attempt.let_go()
    move_to(attempt, successor)


def move_an_ended_one(attempt: Attempt, successor: Attempt) -> None:
    attempt.close()
    attempt.successor = successor


def keep_the_source(attempt: Attempt, successor: Attempt) -> None:
    attempt._end(attempt.outcome_of(sampling_pb2.FINISH_REASON_UNSPECIFIED))
    attempt.successor = successor


def lose_held_ones(attempt: Attempt) -> None:
    attempt._held = None
    attempt.forward(attempt.response.add_tokens)


def keep_the_target(attempt: Attempt) -> None:
    if attempt._take_over is None or attempt.generates:
        close(attempt)


move_to, close = Attempt.move_to, Attempt.close


@pytest.mark.parametrize(
    ("method", "replaced", "words"),
    [
        ("move_to", give_held_ones, "the client has tokens [0, 1, 2, "),
        ("move_to", keep_the_source, "2 workers generate the answer"),
        ("let_go", lose_held_ones, "the client has tokens [0, 1, 2, "),
        ("close", keep_the_target, "requests on d1"),
    ],
)
def test_without_a_safeguard_a_violation_is_found(
    method: str, replaced: Callable[..., None], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Attempt, method, replaced)
    assert words in _found(3)


def test_without_a_look_at_its_end_a_source_moves_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Attempt, "move_to", move_an_ended_one)
    with pytest.raises(Violation):
        end_as_the_target_begins()
