"""Answers that move between workers with simulated engines, behind a real router and a real registry."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from headrace.inference.v1 import inference_pb2
from headrace_router.dispatch.attempt import Attempt
from headrace_router.tracing.attempt_record import Move
from tests.component.worker.test_both_roles import CLOSED_FORM, MODEL, NAMES, Pair, running
from tests.suite.deployment import greedy, prompt_of
from tests.waiting import until

SLOW = f"{MODEL},decode_step_s=0.01"
TOKENS = 120


@dataclass(slots=True)
class Answer:
    """An answer that is being read."""

    tokens: list[int] = field(default_factory=list)
    last: inference_pb2.GenerateResponse = field(default_factory=inference_pb2.GenerateResponse)
    reading: asyncio.Task[None] | None = None

    async def has(self, count: int) -> None:
        await until(lambda: len(self.tokens) >= count)


def ask(pair: Pair, request: inference_pb2.GenerateRequest) -> Answer:
    answer = Answer()

    async def read() -> None:
        async for message in pair.rig.stub.Generate(request, timeout=60):
            answer.tokens += message.token_ids
            answer.last = message

    answer.reading = asyncio.create_task(read())
    return answer


def attempt_of(pair: Pair, name: str) -> Attempt:
    """The attempt that leads a request."""
    (found,) = [
        one
        for one in pair.rig.router.moves.dispatcher.running.values()
        if one.request.prepared.request_id == name
    ]
    return found


async def test_an_answer_moves_with_its_kv() -> None:
    async with running(SLOW) as pair:
        request = greedy(prompt_of(100, 1), TOKENS)
        request.request_id = "one"
        answer = ask(pair, request)
        await answer.has(20)
        source = attempt_of(pair, "one").decode_worker
        moved = await pair.rig.operator_stub.MoveAnswer(
            inference_pb2.MoveAnswerRequest(request_id="one"), timeout=30
        )
        print(moved)
        await answer.reading
        assert tuple(answer.tokens) == CLOSED_FORM.expected_tokens(request.tokens.ids, TOKENS)
        print(answer.last)
        trace = await pair.rig.trace_of("one")
        for span in trace.spans:
            print(span.name, dict(span.attributes) if "move" in span.name or "attempt" in span.name else "")
        await pair.wait_idle()
