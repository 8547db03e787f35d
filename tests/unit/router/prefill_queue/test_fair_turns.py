"""Claimants take turns by their weights, and none starves."""

from __future__ import annotations

from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_common.callers.priority import Priority
from headrace_router.prefill_queue.waiting import WeightedTurns, amount_ahead

_TOKENS_MAX = 1_000
_CLASSES = st.sampled_from(list(Priority))
_ARRIVALS = st.tuples(st.just("arrive"), _CLASSES, st.integers(1, _TOKENS_MAX))
_HAND_OUTS = st.tuples(st.just("hand out"), st.just(Priority.NORMAL), st.just(0))


class Queue:
    """Tasks by class, each in the order of arrival, handed out in turn."""

    def __init__(self) -> None:
        self.turns = WeightedTurns[Priority](lambda priority: priority.weight)
        self.waiting: dict[Priority, deque[int]] = {one: deque() for one in Priority}

    def arrive(self, priority: Priority, tokens: int) -> None:
        if not self.waiting[priority]:
            self.turns.became_busy(priority)
        self.waiting[priority].append(tokens)

    def hand_out(self) -> tuple[Priority, int] | None:
        busy = [one for one in Priority if self.waiting[one]]
        if not busy:
            return None
        priority = min(busy, key=self.turns.start)
        tokens = self.waiting[priority].popleft()
        if not self.waiting[priority]:
            self.turns.became_idle(priority)
        self.turns.handed_out(priority, tokens)
        return priority, tokens


@settings(max_examples=300, deadline=None)
@given(steps=st.lists(st.one_of(_ARRIVALS, _ARRIVALS, _HAND_OUTS), max_size=120))
def test_no_class_starves_and_the_bound_holds(steps: list[tuple[str, Priority, int]]) -> None:
    """While a class waits, another gets at most its ratio of the class's last task, and a task of its own."""
    queue = Queue()
    # For each class that waits: the tokens of its task before, and what each other class got since then.
    last = dict.fromkeys(Priority, 0)
    others: dict[Priority, dict[Priority, int]] = {
        one: dict.fromkeys(Priority, 0) for one in Priority
    }

    def hand_out() -> bool:
        handed = queue.hand_out()
        if handed is None:
            return False
        priority, tokens = handed
        for one in Priority:
            if one is priority or not queue.waiting[one]:
                continue
            others[one][priority] += tokens
            allowed = priority.weight / one.weight * last[one] + _TOKENS_MAX
            assert others[one][priority] <= allowed + 1e-6
        last[priority] = tokens
        others[priority] = dict.fromkeys(Priority, 0)
        return True

    for kind, priority, tokens in steps:
        if kind == "arrive":
            if not queue.waiting[priority]:
                others[priority] = dict.fromkeys(Priority, 0)
            queue.arrive(priority, tokens)
        else:
            hand_out()
    # Every task is handed out, however many there are.
    while hand_out():
        pass
    assert not any(queue.waiting.values())


def test_a_claimant_pays_nothing_for_the_tokens_that_it_had_alone() -> None:
    queue = Queue()
    for priority in (Priority.LOW, Priority.HIGH):
        queue.arrive(priority, _TOKENS_MAX)
        assert queue.hand_out() == (priority, _TOKENS_MAX)
    queue.arrive(Priority.LOW, 1)
    queue.arrive(Priority.HIGH, 16)
    assert queue.turns.start(Priority.LOW) == queue.turns.start(Priority.HIGH)


@given(
    own=st.floats(1, 1e6),
    priority=_CLASSES,
    waiting=st.dictionaries(_CLASSES, st.floats(0, 1e6)),
)
def test_the_amount_ahead_is_own_and_no_more_than_the_shares_of_the_others(
    own: float, priority: Priority, waiting: dict[Priority, float]
) -> None:
    others = {one: amount for one, amount in waiting.items() if one is not priority}
    ahead = amount_ahead(
        own, priority.weight, [(amount, one.weight) for one, amount in others.items()]
    )
    assert own <= ahead <= own + sum(others.values()) + 1e-6
    assert ahead <= own + sum(own * one.weight / priority.weight for one in others) + 1e-6
