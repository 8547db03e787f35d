"""A transfer enters only the states that follow; a wrong step changes nothing."""

from __future__ import annotations

import itertools

import pytest

from headrace_common.errors import InternalError
from headrace_kv.receive.transfer import NEXT_STATES, StateMachine, TransferState

S = TransferState
WHOLE = (S.OPEN, S.RECEIVING, S.COMPLETE, S.FREE)
PATHS = {
    S.RESERVED: (),
    S.OPEN: (S.OPEN,),
    S.RECEIVING: (S.OPEN, S.RECEIVING),
    S.COMPLETE: (S.OPEN, S.RECEIVING, S.COMPLETE),
    S.FAILED: (S.FAILED,),
    S.DRAINING: (S.FAILED, S.DRAINING),
    S.FREE: (S.FAILED, S.DRAINING, S.FREE),
}


def at(state: TransferState) -> StateMachine:
    machine = StateMachine("x1")
    for step in PATHS[state]:
        machine.enter(step)
    return machine


@pytest.mark.parametrize(("state", "following"), list(itertools.product(S, S)))
def test_a_state_that_does_not_follow_is_rejected(
    state: TransferState, following: TransferState
) -> None:
    machine = at(state)
    before = machine.transitions
    if following in NEXT_STATES[state]:
        machine.enter(following)
        assert machine.state is following
        assert machine.transitions[:-1] == before
    else:
        with pytest.raises(InternalError, match=f"from {state.value} to {following.value}"):
            machine.enter(following)
        assert machine.state is state
        assert machine.transitions == before


def test_every_path_ends_at_free() -> None:
    def longest(state: TransferState, seen: frozenset[TransferState]) -> int:
        assert state not in seen
        ways = NEXT_STATES[state]
        assert ways or state is S.FREE
        return 1 + max((longest(way, seen | {state}) for way in ways), default=0)

    assert longest(S.RESERVED, frozenset()) == 6


def test_transitions_hold_the_time_of_entry() -> None:
    ticks = itertools.count(10)
    machine = StateMachine("x1", lambda: next(ticks))
    for state in WHOLE:
        machine.enter(state)
    assert machine.transitions == tuple(zip((S.RESERVED, *WHOLE), range(10, 15), strict=True))
