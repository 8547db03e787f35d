"""Tokens that are used in the turn of the event loop in which they arrive."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from headrace.inference.v1 import sampling_pb2
from headrace_common.errors import InternalError
from headrace_router.decode_link.answer import LinkedAnswer


async def _reading(answer: LinkedAnswer) -> asyncio.Task[list[int]]:
    async def read() -> list[int]:
        return list((await answer.read()).tokens.token_ids)

    reader = asyncio.create_task(read())
    await asyncio.sleep(0)
    return reader


async def test_a_consumer_gets_tokens_while_the_reader_waits_and_gives_credit() -> None:
    granted: list[int] = []
    used: list[int] = []
    takes = True

    def consume(token_ids: Sequence[int]) -> bool:
        if takes:
            used.extend(token_ids)
        return takes

    answer = LinkedAnswer(1, 4, lambda _, tokens: granted.append(tokens))
    answer.consume_with(consume)
    # Nothing reads yet, so the attempt still handles an earlier event.
    answer.add_tokens([1])
    assert used == []
    assert list((await answer.read()).tokens.token_ids) == [1]
    reader = await _reading(answer)
    for token in (2, 3, 4, 5, 6):
        answer.add_tokens([token])
    assert used == [2, 3, 4, 5, 6]
    assert sum(granted) >= 4
    answer.add_tokens([7], [sampling_pb2.TokenLogprobs(logprob=-1.0)])
    # These wait behind a token that the reader has not read.
    answer.add_tokens([8])
    assert await reader == [7, 8]
    takes = False
    reader = await _reading(answer)
    answer.add_tokens([9])
    takes = True
    answer.add_tokens([10])
    assert await reader == [9, 10]
    assert used == [2, 3, 4, 5, 6]


async def test_a_bug_of_a_consumer_fails_its_request_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def consume(token_ids: Sequence[int]) -> bool:
        raise ZeroDivisionError

    answer = LinkedAnswer(1, 8, lambda _, tokens: None)
    answer.consume_with(consume)
    reader = await _reading(answer)
    answer.add_tokens([1])
    with pytest.raises(InternalError, match="a bug in Headrace"):
        await reader
    assert "tokens of one request were not used" in caplog.text
