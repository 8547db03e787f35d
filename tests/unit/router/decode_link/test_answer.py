"""One request on a link: events in order, credit for what was used, and tokens that bypass the reader."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import sampling_pb2
from headrace_common.errors import ProtocolViolation
from headrace_common.limits import PROMPT_LOGPROBS_VALUES_MAX
from headrace_router.decode_link.answer import LinkedAnswer
from headrace_simulator.virtual_time import run_virtually

VOCABULARY = 1_000_000


class Reader:
    """Reads an answer with a sink, as an attempt does. The sink stops at each multiple of `stop_at`."""

    def __init__(self, window: int = 8, stop_at: int = 1_000) -> None:
        self.granted = 0
        self.answer = LinkedAnswer(1, window, self._grant, VOCABULARY)
        self.answer.forward(self._use)
        self.token_ids: list[int] = []
        self.used_at_once = 0
        self.events: list[str] = []
        self._stop_at = stop_at

    def _grant(self, stream_id: int, tokens: int) -> None:
        self.granted += tokens

    def _use(self, token_ids: Sequence[int], logprobs: Sequence[Any]) -> bool:
        self.token_ids += token_ids
        self.used_at_once += len(token_ids)
        return len(self.token_ids) % self._stop_at != 0

    async def read(self) -> None:
        while True:
            event = await self.answer.read()
            if isinstance(event, decode_pb2.Tokens):
                self.token_ids += event.token_ids
            self.events.append(type(event).__name__.lower())
            if isinstance(event, decode_pb2.Finished):
                return


async def turns(count: int = 3) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_the_reader_gets_the_error_of_its_sink() -> None:
    def broken(token_ids: Sequence[int], logprobs: Sequence[Any]) -> bool:
        raise ValueError("a bug")

    answer = LinkedAnswer(1, 8, lambda stream_id, tokens: None, VOCABULARY)
    answer.forward(broken)
    read = asyncio.create_task(answer.read())
    await turns()
    answer.add_tokens([1])
    with pytest.raises(ValueError, match="a bug"):
        await asyncio.wait_for(read, 5)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 3)), max_size=30),
    st.sampled_from((2, 3, 5, 1_000)),
)
def test_no_token_is_lost_or_moved_between_sink_and_reader(
    steps: list[tuple[int, int]], stop_at: int
) -> None:
    async def run() -> None:
        reader = Reader(window=10_000, stop_at=stop_at)
        task = asyncio.create_task(reader.read())
        sent: list[int] = []
        for count, pause in steps:
            new = list(range(len(sent), len(sent) + count))
            reader.answer.add_tokens(new)
            sent += new
            await turns(pause)
        reader.answer.finish(decode_pb2.Finished())
        await asyncio.wait_for(task, 5)
        assert reader.token_ids == sent

    run_virtually(run)


def test_more_prompt_logprobs_than_a_request_may_have_are_a_violation() -> None:
    answer = LinkedAnswer(1, 8, lambda stream_id, tokens: None, VOCABULARY)
    many = [sampling_pb2.TokenLogprobs()] * (PROMPT_LOGPROBS_VALUES_MAX // 2)
    answer.add_prompt_logprobs(many)
    answer.add_prompt_logprobs(many)
    assert answer.poll() is None
    with pytest.raises(ProtocolViolation):
        answer.add_prompt_logprobs(many)


@pytest.mark.parametrize("forwarded", [False, True])
async def test_nothing_after_a_token_beyond_the_vocabulary_is_read(forwarded: bool) -> None:
    answer = LinkedAnswer(1, 99, lambda stream_id, tokens: None, 10)
    used: list[int] = []

    def use(token_ids: Sequence[int], logprobs: Sequence[Any]) -> bool:
        used.extend(token_ids)
        return True

    if forwarded:
        answer.forward(use)
    read = asyncio.create_task(answer.read())
    await turns()
    answer.add_tokens([10])
    answer.add_tokens([1])
    answer.finish(decode_pb2.Finished())
    with pytest.raises(ProtocolViolation, match="sent token 10, and the vocabulary has 10"):
        await read
    assert not used
