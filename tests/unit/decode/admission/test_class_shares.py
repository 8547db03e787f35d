"""A decode worker's room goes to the class that uses the least for its weight, while not all find room."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_common.callers.priority import Priority
from headrace_common.errors import DecodeFull
from headrace_decode.admission.admission import Admission, Capacity
from headrace_decode.admission.class_shares import ClassShares

_CLASSES = st.sampled_from(list(Priority))
_CAPACITY = Capacity(usable_blocks=20, block_tokens=16, max_model_len=400, max_num_seqs=50)


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@settings(max_examples=300, deadline=None)
@given(
    capacity=st.integers(1, 40),
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("ask"), _CLASSES, st.integers(1, 12)),
            st.tuples(st.just("ask"), _CLASSES, st.integers(1, 12)),
            st.tuples(st.just("end"), _CLASSES, st.integers(0, 50)),
            st.tuples(st.just("pass"), _CLASSES, st.integers(1, 3)),
        ),
        max_size=80,
    ),
)
def test_room_goes_to_the_class_with_the_least_for_its_weight(
    capacity: int, steps: list[tuple[str, Priority, int]]
) -> None:
    clock = Clock()
    shares = ClassShares(clock)
    held: list[tuple[Priority, int]] = []
    waiting: dict[Priority, tuple[int, float]] = {}
    for kind, priority, number in steps:
        if kind == "pass":
            clock.now_s += number
        elif kind == "end" and held:
            shares.give_back(*held.pop(number % len(held)))
        elif kind == "ask":
            before = shares.used_by(priority)
            if shares.kept_for(priority, number) is not None:
                # A class that uses nothing is never refused for the sake of another.
                assert before
                continue
            if sum(amount for _, amount in held) + number > capacity:
                shares.refused(priority, number, 2.0)
                smallest, until_s = waiting.get(priority, (number, 0.0))
                smallest = min(number, smallest) if clock.now_s < until_s else number
                waiting[priority] = smallest, clock.now_s + 2.0
                continue
            shares.take(priority, number)
            held.append((priority, number))
            waiting.pop(priority, None)
            for other, (amount, until_s) in waiting.items():
                if before and clock.now_s < until_s:
                    own = (before + number) / priority.weight
                    assert own <= (shares.used_by(other) + amount) / other.weight + 1e-9
    for one in held:
        shares.give_back(*one)
    assert not any(shares.used_by(priority) for priority in Priority)


def _admit(admission: Admission, name: str, blocks: int, priority: Priority) -> None:
    admission.admit(
        name,
        prompt_tokens=16 * blocks - 1,
        max_tokens=1,
        quarantined_blocks=0,
        priority=priority,
    )


def test_blocks_are_kept_for_a_refused_request_of_a_higher_class_until_it_had_time_to_return() -> (
    None
):
    clock = Clock()
    admission = Admission(_CAPACITY, clock)
    for number in range(5):
        _admit(admission, f"low-{number}", 4, Priority.LOW)
    with pytest.raises(DecodeFull, match="8 blocks are needed and 0 are free"):
        _admit(admission, "high", 8, Priority.HIGH)
    admission.release("low-0")
    with pytest.raises(DecodeFull, match="kept for a request of class high"):
        _admit(admission, "low-5", 4, Priority.LOW)
    admission.release("low-1")
    _admit(admission, "high", 8, Priority.HIGH)
    admission.release("low-2")
    _admit(admission, "low-6", 4, Priority.LOW)
    with pytest.raises(DecodeFull, match="are free"):
        _admit(admission, "high-2", 4, Priority.HIGH)
    admission.release("low-3")
    with pytest.raises(DecodeFull, match="kept for"):
        _admit(admission, "low-7", 4, Priority.LOW)
    # The refused request did not return in time.
    clock.now_s += 60.0
    _admit(admission, "low-7", 4, Priority.LOW)


def test_one_class_alone_is_never_refused_for_the_sake_of_another() -> None:
    admission = Admission(_CAPACITY, Clock())
    for number in range(5):
        _admit(admission, f"a{number}", 4, Priority.NORMAL)
    with pytest.raises(DecodeFull, match="are free"):
        _admit(admission, "b", 8, Priority.NORMAL)
    admission.release("a0")
    _admit(admission, "c", 4, Priority.NORMAL)
