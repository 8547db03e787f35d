"""Waiting for a condition in tests."""

from __future__ import annotations

import pytest

from tests.waiting import until


async def test_a_synchronous_and_an_asynchronous_condition_are_polled() -> None:
    left = 4

    def count_down() -> bool:
        nonlocal left
        left -= 1
        return left <= 0

    async def is_negative() -> bool:
        return count_down() and left < 0

    await until(count_down)
    assert left == 0
    await until(is_negative)
    assert left == -1


@pytest.mark.parametrize("what", ["the port", lambda: "the port"])
async def test_the_error_names_the_condition(what: str) -> None:
    with pytest.raises(AssertionError, match=r"not within 0.01 s: the port"):
        await until(lambda: False, 0.01, what)


async def test_a_timeout_inside_the_condition_is_not_converted() -> None:
    async def condition() -> bool:
        raise TimeoutError("of the condition")

    with pytest.raises(TimeoutError, match="of the condition"):
        await until(condition)
