"""The memory for what clients send: which input ends when it is in use."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace_common.callers.bounds import InputMemory


@dataclass(eq=False)
class Part:
    """An input that records its end."""

    caller: str
    ended: list[str] = field(default_factory=list)

    def end_input(self) -> None:
        self.ended.append(self.caller)


def test_the_oldest_input_of_the_caller_with_most_bytes_ends() -> None:
    memory = InputMemory(100)
    small, first, second = Part("small"), Part("large"), Part("large")
    memory.hold(small, 30)
    memory.hold(first, 40)
    memory.hold(second, 20)
    assert [part.ended for part in (small, first, second)] == [[], [], []]
    memory.hold(second, 60)
    assert (small.ended, first.ended, second.ended) == ([], ["large"], [])
    assert memory.bytes == 90


def test_a_caller_that_only_grows_ends_its_own_inputs() -> None:
    memory = InputMemory(100)
    other, many = Part("other"), [Part("large") for _ in range(50)]
    memory.hold(other, 10)
    for part in many:
        memory.hold(part, 10)
    assert [bool(part.ended) for part in many] == [True] * 41 + [False] * 9
    assert not other.ended
    assert memory.bytes == 100


def test_released_inputs_count_no_more_and_a_single_one_is_not_ended() -> None:
    memory = InputMemory(100)
    large, small = Part("large"), Part("small")
    memory.hold(large, 500)
    assert not large.ended
    memory.hold(small, 1)
    assert large.ended
    memory.release(large)
    memory.release(small)
    assert memory.bytes == 0
