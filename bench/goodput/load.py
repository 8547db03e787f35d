"""Loads of the goodput benchmark: which request arrives when, and the sending of them to one way.

A load depends on its name, rate, length and seed alone, so every way gets the same requests at the same times.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from bench.goodput.report import FACTORS, Answer, Factors, Objective
from bench.support.vllm_ways import prompt_of
from headrace_common.errors import HeadraceError

TOKEN_IDS: Final = range(3, 512)
"""Of the model that runs. The smallest ids are those of special tokens."""
PROMPTS: Final = (512, 8_192)
ANSWERS: Final = (32, 224)
TURNS: Final = 20
TURN_S: Final = 4.0
PHASE_S: Final = 15.0
_AGENTS: Final = 0.3
_AGENT_SHARED: Final = 0.96
_AGENT_PREFIXES: Final = 4
BESIDE: Final = 3
_BESIDE_TOKENS: Final = (128, 512)
LENGTHS: Final = (512, 1_024, 2_048, 4_096, 8_192)


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request, `due_s` after the start of its block. The first `shared_tokens` follow from `shared_seed`.

    `factors` are its bounds, where requests of the load have bounds of their own.
    """

    due_s: float
    prompt_tokens: int
    answer_tokens: int
    seed: int
    shared_tokens: int = 0
    shared_seed: int = 0
    factors: Factors | None = None

    def prompt(self) -> list[int]:
        """Its token ids."""
        shared = prompt_of(self.shared_tokens, self.shared_seed, TOKEN_IDS)
        return shared + prompt_of(self.prompt_tokens - self.shared_tokens, self.seed, TOKEN_IDS)


# Yields the time of every token. Arguments: prompt, number of tokens, number of the request, its bounds.
Ask = Callable[[list[int], int, int, Objective | None], AsyncIterator[int]]
Load = Callable[[float, float, random.Random], Sequence[Arrival]]


def plain(rate: float, seconds: float, numbers: random.Random) -> list[Arrival]:
    """Poisson arrivals. The logarithm of a prompt's length is evenly spread, and so is an answer's length."""
    return list(_poisson(rate, seconds, PROMPTS, ANSWERS, numbers))


def chats(rate: float, seconds: float, numbers: random.Random) -> list[Arrival]:
    """Turns of chats that begin at random times. Each prompt begins with the one before, and is longer."""
    before_s = TURN_S * (TURNS - 1)
    shortest, longest = PROMPTS
    found = [
        replace(
            chat,
            due_s=chat.due_s - before_s + TURN_S * turn,
            prompt_tokens=shortest + (longest - shortest) * turn // (TURNS - 1),
        )
        for chat in _poisson(rate / TURNS, seconds + before_s, PROMPTS, ANSWERS, numbers)
        for turn in range(TURNS)
    ]
    return sorted((one for one in found if 0 <= one.due_s < seconds), key=lambda one: one.due_s)


def flips(rate: float, seconds: float, numbers: random.Random) -> list[Arrival]:
    """Phases of long prompts with short answers, and of short prompts with long answers, in turn."""
    kinds = (((4_096, 8_192), (16, 48)), ((256, 1_024), (192, 320)))
    return [
        replace(one, due_s=one.due_s + phase * PHASE_S)
        for phase in range(math.ceil(seconds / PHASE_S))
        for one in _poisson(rate, PHASE_S, *kinds[phase % 2], numbers)
    ]


def mixed(rate: float, seconds: float, numbers: random.Random) -> list[Arrival]:
    """Half of the requests with the first of the bounds, half with the last. Some are of agents.

    Agents' prompts share most of their tokens with others.
    """
    found = []
    for one in _poisson(rate, seconds, PROMPTS, ANSWERS, numbers):
        agent = numbers.random() < _AGENTS
        found.append(
            replace(
                one,
                factors=numbers.choice((FACTORS[0], FACTORS[-1])),
                shared_tokens=int(_AGENT_SHARED * one.prompt_tokens) if agent else 0,
                shared_seed=numbers.randrange(_AGENT_PREFIXES),
            )
        )
    return found


def day(rate: float, seconds: float, numbers: random.Random) -> list[Arrival]:
    """Arrivals rise from nothing to the rate and fall again, as in half of a wave."""
    return [
        one
        for one in _poisson(rate, seconds, PROMPTS, ANSWERS, numbers)
        if numbers.random() < math.sin(math.pi * one.due_s / seconds)
    ]


LOADS: Final[dict[str, Load]] = {one.__name__: one for one in (plain, chats, flips, mixed, day)}


def arrivals(name: str, rate: float, seconds: float, seed: int) -> Sequence[Arrival]:
    """The requests of a load."""
    return LOADS[name](rate, seconds, random.Random(f"{name}/{seed}/{rate:g}"))


def _poisson(
    rate: float,
    seconds: float,
    prompts: tuple[int, int],
    answers: tuple[int, int],
    numbers: random.Random,
) -> Iterator[Arrival]:
    low, high = map(math.log, prompts)
    due_s = itertools.accumulate(numbers.expovariate(rate) for _ in itertools.count())
    for at_s in itertools.takewhile(lambda at_s: at_s < seconds, due_s):
        yield Arrival(
            at_s,
            int(math.exp(numbers.uniform(low, high))),
            numbers.randint(*answers),
            numbers.getrandbits(48),
        )


async def send_alone(
    ask: Ask, seconds: float, seed: int, step_ms: float, bounds: Callable[[Factors], Objective]
) -> list[Answer]:
    """The first tokens of prompts of all LENGTHS, one request after the other, beside BESIDE answers without end."""
    numbers = random.Random(f"handover/{seed}")
    requests = itertools.count()

    def new_one(tokens: tuple[int, int]) -> Arrival:
        return Arrival(0.0, *tokens, numbers.getrandbits(48), factors=FACTORS[1])

    async def generate() -> None:
        await asyncio.sleep(numbers.uniform(0, BESIDE))
        while True:
            one = new_one(_BESIDE_TOKENS)
            objective = bounds(FACTORS[1])
            async for _ in ask(one.prompt(), one.answer_tokens, next(requests), objective):
                pass

    beside = [asyncio.create_task(generate()) for _ in range(BESIDE)]
    answers: list[Answer] = []
    try:
        await asyncio.sleep(2 * BESIDE)
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            for tokens in numbers.sample(LENGTHS, len(LENGTHS)):
                # Requests arrive at any moment of a step.
                await asyncio.sleep(1e-3 * step_ms * numbers.uniform(4, 6))
                answers += await send(ask, [new_one((tokens, 4))], seconds, bounds)
    finally:
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
    return answers


async def send(
    ask: Ask, arriving: Sequence[Arrival], drain_s: float, bounds: Callable[[Factors], Objective]
) -> list[Answer]:
    """The answers in the order of their arrivals.

    A request that has not ended `drain_s` after the last arrival has failed. `bounds` makes those of a request from
    its factors.
    """
    # Prompts are made before the first request is due.
    prompts = [one.prompt() for one in arriving]

    async def one(arrival: Arrival, prompt: list[int], number: int) -> Answer:
        due_s = start_s + arrival.due_s
        await asyncio.sleep(due_s - time.monotonic())
        due_ns = time.time_ns()
        objective = None if arrival.factors is None else bounds(arrival.factors)
        token_ms: list[float] = []
        failed = False
        try:
            async with asyncio.timeout(end_s - time.monotonic()):
                async for now_ns in ask(prompt, arrival.answer_tokens, number, objective):
                    token_ms.append((now_ns - due_ns) / 1e6)  # noqa: PERF401 - kept on a timeout
        except (HeadraceError, TimeoutError) as error:
            print(f"a request failed: {error!r}", file=sys.stderr)
            failed = True
        return Answer(
            tuple(token_ms),
            failed=failed or len(token_ms) < arrival.answer_tokens,
            prompt_tokens=arrival.prompt_tokens,
            factors=arrival.factors,
            due_s=arrival.due_s,
        )

    start_s = time.monotonic()
    end_s = start_s + max((one.due_s for one in arriving), default=0.0) + drain_s
    return await asyncio.gather(
        *(
            one(arrival, prompt, number)
            for number, (arrival, prompt) in enumerate(zip(arriving, prompts, strict=True))
        )
    )
