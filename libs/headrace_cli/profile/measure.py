"""Measures a deployment of one prefill and one decode worker through its router."""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

from headrace.inference.v1 import inference_pb2
from headrace_client import build_request
from headrace_common.errors import ConfigError, InternalError
from headrace_planner.profile import DecodePoint, PrefillPoint

# Of ordinary text, in the vocabulary of any model.
_TOKEN_IDS: Final = range(300, 1_300)
# Answers are longer than the measured part, because they begin one after the other.
_ANSWER_FACTORS: Final = (4, 16)

Generate = Callable[
    [inference_pb2.GenerateRequest, float], AsyncIterator[inference_pb2.GenerateResponse]
]


Notice = Callable[[str], object]
"""Shows a line while the measurement goes on."""


@dataclass(frozen=True, slots=True)
class WorkerSize:
    """What the registry and the decode worker say of its size."""

    model: str
    max_model_len: int
    max_num_seqs: int
    kv_tokens: int


@dataclass(frozen=True, slots=True)
class ProfileGrid:
    """What is measured. `answer_tokens` of every answer are measured once all answers of a point have begun.

    A point is the median of its repeats. With `fastest`, a point of prefill is the fastest of them, which other load
    disturbs least. A rate of decode is always a median: a client that was delayed reads many tokens at once.
    """

    prompt_lengths: Sequence[int]
    contexts: Sequence[int]
    concurrencies: Sequence[int]
    repeats: int
    answer_tokens: int
    timeout_s: float
    seed: int
    fastest: bool = False

    def check(self, size: WorkerSize) -> None:
        """Raises ConfigError when no request of a length can fit."""
        longest = max((*self.prompt_lengths, *self.contexts))
        if longest + 2 > size.max_model_len:
            raise ConfigError(
                f"prompts of {longest} tokens do not fit into the context of {size.max_model_len} tokens: "
                "give shorter ones with --prompt-tokens and --context-tokens"
            )


class Profiler:
    """Sends random prompts, each of which is new, so that no prefix cache has them."""

    def __init__(
        self, generate: Generate, size: WorkerSize, grid: ProfileGrid, notice: Notice
    ) -> None:
        self._generate = generate
        self._size = size
        self._grid = grid
        self._notice = notice
        self._numbers = itertools.count()

    async def prefill_points(self) -> tuple[PrefillPoint, ...]:
        """The time to first token of one prompt at a time, by its length."""
        points: list[PrefillPoint] = []
        # The first request of a deployment also opens connections.
        await self._first_token_s(min(self._grid.prompt_lengths))
        for length in sorted(set(self._grid.prompt_lengths)):
            times_s = [await self._first_token_s(length) for _ in range(self._grid.repeats)]
            point = PrefillPoint(prompt_tokens=length, ttft_s=self._of(times_s))
            points.append(point)
            self._notice(f"{length} prompt tokens: first token after {point.ttft_s * 1e3:.1f} ms")
        return tuple(points)

    async def decode_points(self) -> tuple[DecodePoint, ...]:
        """The time between tokens and the throughput, by context and concurrency."""
        points: list[DecodePoint] = []
        for context in sorted(set(self._grid.contexts)):
            for concurrency in sorted(set(self._grid.concurrencies)):
                point = await self._decode_point(context, concurrency)
                if point is None:
                    self._notice(
                        f"{concurrency} answers after {context} tokens: they do not fit together, left out"
                    )
                    break
                points.append(point)
                self._notice(
                    f"{concurrency} answers after {context} tokens: {point.itl_s * 1e3:.1f} ms between tokens, "
                    f"{point.tokens_per_s:.0f} tokens/s"
                )
        return tuple(points)

    async def _decode_point(self, context: int, concurrency: int) -> DecodePoint | None:
        """None when the answers do not fit into the worker at the same time."""
        if concurrency > self._size.max_num_seqs:
            return None
        for factor in _ANSWER_FACTORS:
            answer_tokens = min(
                factor * self._grid.answer_tokens, self._size.max_model_len - context - 1
            )
            if concurrency * (context + answer_tokens) > self._size.kv_tokens:
                return None
            rates = [
                rate
                for _ in range(self._grid.repeats)
                if (rate := await self._rate(context, concurrency, answer_tokens)) is not None
            ]
            if rates:
                tokens_per_s = statistics.median(rates)
                mean_context = context + self._grid.answer_tokens / 2
                return DecodePoint(
                    kv_usage=min(1.0, concurrency * mean_context / self._size.kv_tokens),
                    context_tokens=mean_context,
                    itl_s=concurrency / tokens_per_s,
                    tokens_per_s=tokens_per_s,
                )
        return None

    def _of(self, times_s: list[float]) -> float:
        return min(times_s) if self._grid.fastest else statistics.median(times_s)

    async def _rate(self, context: int, concurrency: int, answer_tokens: int) -> float | None:
        """Tokens a second of all answers, while all of them are under way. None when one ended too early."""
        counts = _Counts(concurrency, self._grid.answer_tokens)
        async with asyncio.timeout(self._grid.timeout_s), asyncio.TaskGroup() as group:
            answers = [
                group.create_task(self._count(context, answer_tokens, counts))
                for _ in range(concurrency)
            ]
            await counts.measured.wait()
            for answer in answers:
                answer.cancel()
        return counts.tokens_per_s

    async def _count(self, context: int, answer_tokens: int, counts: _Counts) -> None:
        number = counts.begin()
        request = self._request(context, answer_tokens)
        async with aclosing(self._generate(request, self._grid.timeout_s)) as responses:  # type: ignore[type-var]
            async for response in responses:
                if response.token_ids:
                    counts.add(number, len(response.token_ids), time.monotonic())
        counts.ended()

    async def _first_token_s(self, length: int) -> float:
        start_s = time.monotonic()
        found_s: float | None = None
        async for response in self._generate(self._request(length, 1), self._grid.timeout_s):
            if response.token_ids and found_s is None:
                found_s = time.monotonic() - start_s
        if found_s is None:
            raise InternalError(f"a prompt of {length} tokens got no token")
        return found_s

    def _request(self, prompt_tokens: int, answer_tokens: int) -> inference_pb2.GenerateRequest:
        seed = f"profile/{self._grid.seed}/{next(self._numbers)}"
        request = build_request(
            tokens=random.Random(seed).choices(_TOKEN_IDS, k=prompt_tokens),
            model=self._size.model,
            max_tokens=answer_tokens,
            temperature=0.0,
        )
        request.sampling.ignore_eos = True
        return request


class _Counts:
    """Tokens of answers since all of them have begun. `measured` is set when each has enough, or one has ended."""

    def __init__(self, concurrency: int, answer_tokens: int) -> None:
        self.measured = asyncio.Event()
        self.tokens_per_s: float | None = None
        self._answer_tokens = answer_tokens
        self._tokens: list[int] = []
        self._concurrency = concurrency
        self._first: set[int] = set()
        self._start_s = 0.0

    def begin(self) -> int:
        """Another answer. Returns its number."""
        self._tokens.append(0)
        return len(self._tokens) - 1

    def add(self, number: int, tokens: int, now_s: float) -> None:
        """Tokens of an answer have arrived."""
        if self.measured.is_set():
            return
        if len(self._first) < self._concurrency:
            self._first.add(number)
            if len(self._first) == self._concurrency:
                self._start_s = now_s
            return
        self._tokens[number] += tokens
        if min(self._tokens) >= self._answer_tokens:
            self.tokens_per_s = sum(self._tokens) / max(1e-9, now_s - self._start_s)
            self.measured.set()

    def ended(self) -> None:
        """An answer has ended."""
        self.measured.set()
