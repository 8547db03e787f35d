"""Conversations over shared system prompts, and what their requests see."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from headrace.inference.v1 import inference_pb2, sampling_pb2

ANSWER_TOKENS, THINK_S, STARTS_PER_S = 24, 0.5, 9.6
VOCABULARY = 512
REQUEST_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of the conversations."""

    conversations: int
    turns: int
    turn_tokens: tuple[int, int]
    systems: int
    system_tokens: int

    def __str__(self) -> str:
        return (
            f"{self.conversations} conversations of {self.turns} turns over {self.systems} system "
            f"prompt{'s' if self.systems > 1 else ''} of {self.system_tokens} tokens"
        )


@dataclass(frozen=True, slots=True)
class Turn:
    """The text that a user adds after `think_s`."""

    think_s: float
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation that starts with a shared system prompt."""

    system: tuple[int, ...]
    turns: tuple[Turn, ...]


def make_trace(like: Shape, seed: int, tokens_seed: int) -> list[Conversation]:
    """Draws conversations. `seed` sets lengths and times, `tokens_seed` the tokens."""
    shape, tokens = random.Random(seed), random.Random(tokens_seed)

    def some(count: int) -> tuple[int, ...]:
        return tuple(tokens.randrange(VOCABULARY) for _ in range(count))

    start_s = like.conversations / STARTS_PER_S
    systems = [some(like.system_tokens) for _ in range(like.systems)]
    return [
        Conversation(
            shape.choice(systems),
            tuple(
                Turn(
                    shape.expovariate(1 / THINK_S) if number else shape.uniform(0, start_s),
                    some(shape.randint(*like.turn_tokens)),
                )
                for number in range(like.turns)
            ),
        )
        for _ in range(like.conversations)
    ]


@dataclass(slots=True)
class Tally:
    """What the requests of a way saw in one round."""

    ttft_s: list[float] = field(default_factory=list)
    trace_ids: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Prompt tokens and those that decode had cached, by trace."""
    decode: Counter[str] = field(default_factory=Counter)
    remote: set[str] = field(default_factory=set)
    took_s: float = 0.0


async def converse(
    stub: Any,
    conversation: Conversation,
    tally: Tally,
    metadata: tuple[tuple[str, str], ...] = (),
) -> None:
    """Sends every turn after the answer to the one before."""
    history = list(conversation.system)
    for turn in conversation.turns:
        await asyncio.sleep(turn.think_s)
        history += turn.token_ids
        request = inference_pb2.GenerateRequest(
            tokens=inference_pb2.TokenIds(ids=history),
            sampling=sampling_pb2.SamplingParams(
                temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True
            ),
        )
        start_s = time.monotonic()
        first_s = 0.0
        trace_id = ""
        async for response in stub.Generate(request, timeout=REQUEST_TIMEOUT_S, metadata=metadata):
            trace_id = trace_id or response.trace_id
            if response.token_ids and not first_s:
                first_s = time.monotonic()
            history += (token % VOCABULARY for token in response.token_ids)
            if response.HasField("timing"):
                worker_id = response.timing.decode_worker_id
                tally.decode[worker_id] += 1
                if response.timing.prefill_worker_id:
                    tally.remote.add(trace_id)
                usage = response.usage
                tally.trace_ids[trace_id] = (usage.prompt_tokens, usage.decode_cached_tokens)
        tally.ttft_s.append(first_s - start_s)
