"""`headrace profile`: measures a worker, and writes the table that the planner and the simulator read."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final

import typer

from headrace.inference.v1 import inference_pb2
from headrace.registry.v1 import registry_pb2
from headrace_cli.addressed import AddressedCommand
from headrace_cli.client import WAIT_S, Wait, list_members, open_router, registry_of, worker_status
from headrace_cli.options import DEFAULT_ROUTER, Registry, RequestModel, Router
from headrace_cli.output import notice_console, run_command
from headrace_client import build_request
from headrace_common.errors import ConfigError, InternalError
from headrace_common.version import version
from headrace_planner.settings import DecodePoint, PrefillPoint, WorkerProfile

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


_PROMPT_TOKENS: Final = (64, 256, 1_024)
_CONTEXT_TOKENS: Final = (64, 512)
_CONCURRENCIES: Final = (1, 2, 4, 8)
_POINTS_MAX: Final = 32


def register(app: typer.Typer) -> None:
    """Adds `headrace profile`."""
    app.command(
        cls=AddressedCommand,
        epilog="Example:  headrace up --prefill 1 --decode 1   |   headrace profile --output profile.json",
    )(profile)


def profile(  # noqa: PLR0913, PLR0917 - typer makes an option of each
    output: Annotated[Path, typer.Option(metavar="FILE", help="File for the profile, as JSON.")],
    router: Router = DEFAULT_ROUTER,
    registry: Registry = "",
    model: RequestModel = "",
    prompt_tokens: Annotated[
        list[int] | None,
        typer.Option(min=2, help="Length of prompts for prefill; may be repeated."),
    ] = None,
    context_tokens: Annotated[
        list[int] | None, typer.Option(min=2, help="Length of prompts for decode; may be repeated.")
    ] = None,
    concurrency: Annotated[
        list[int] | None, typer.Option(min=1, help="Answers at the same time; may be repeated.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, max=100, help="Measurements of each point.")] = 3,
    answer_tokens: Annotated[
        int, typer.Option(min=2, max=100_000, help="Tokens of each answer that are measured.")
    ] = 32,
    fastest: Annotated[
        bool,
        typer.Option(
            "--fastest", help="Take the fastest repeat for prefill, on a machine with other load."
        ),
    ] = False,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for one point.")] = 600,
    seed: Annotated[int, typer.Option(min=0, help="Equal seeds make equal prompts.")] = 0,
    wait: Wait = WAIT_S,
) -> None:
    """Measures an idle deployment of one prefill and one decode worker. Other requests falsify the result."""

    async def work() -> None:
        if not output.absolute().parent.is_dir():
            raise ConfigError(f"{output} cannot be written: its folder does not exist; make it")
        grid = ProfileGrid(
            tuple(prompt_tokens or _PROMPT_TOKENS),
            tuple(context_tokens or _CONTEXT_TOKENS),
            tuple(concurrency or _CONCURRENCIES),
            repeats,
            answer_tokens,
            timeout,
            seed,
            fastest,
        )
        for name in ("prompt_lengths", "contexts", "concurrencies"):
            if len(getattr(grid, name)) > _POINTS_MAX:
                raise ConfigError(f"at most {_POINTS_MAX} {name} can be measured: give fewer")
        size = await worker_size(await registry_of(router, registry), model)
        grid.check(size)
        notices = notice_console()
        async with open_router(router) as client:
            profiler = Profiler(client.generate, size, grid, notices.print)
            measured = await _measured(profiler, size, grid)
        text = json.dumps(measured.model_dump(mode="json"), indent=1)
        output.write_text(f"{text}\n", encoding="utf-8")
        notices.print(f"wrote {output}")

    run_command(work())


async def worker_size(registry: str, model: str) -> WorkerSize:
    """The size of the only decode worker of a model. Raises ConfigError unless there is one worker of each role."""
    members = [one for one in await list_members(registry) if not model or one.model == model]
    if both := sum(one.role == registry_pb2.Member.ROLE_BOTH for one in members):
        raise ConfigError(
            f"{both} workers of both roles serve, and they learn their times themselves: a profile is that of one "
            "prefill and one decode worker; start `headrace up --prefill 1 --decode 1`, or name another --model"
        )
    prefill = [one for one in members if one.role == registry_pb2.Member.ROLE_PREFILL]
    decode = [one for one in members if one.role == registry_pb2.Member.ROLE_DECODE]
    if len(prefill) != 1 or len(decode) != 1:
        raise ConfigError(
            f"{len(prefill)} prefill and {len(decode)} decode workers serve: a profile is that of one each; "
            "start `headrace up --prefill 1 --decode 1`, or name a --model with one each"
        )
    (worker,) = decode
    status = await worker_status(worker.endpoint)
    block_tokens = worker.layout.groups[0].block_tokens if worker.layout.groups else 0
    if not status.total_blocks or not block_tokens:
        raise InternalError(f"{worker.worker_id} does not report the size of its KV memory")
    return WorkerSize(
        worker.model, worker.max_model_len, worker.max_num_seqs, status.total_blocks * block_tokens
    )


async def _measured(profiler: Profiler, size: WorkerSize, grid: ProfileGrid) -> WorkerProfile:
    prefill = await profiler.prefill_points()
    decode = await profiler.decode_points()
    if not decode:
        raise ConfigError(
            "no answers of these lengths fit into the worker together: give a shorter --context-tokens"
        )
    return WorkerProfile(
        prefill=prefill,
        decode=decode,
        kv_tokens=size.kv_tokens,
        max_num_seqs=size.max_num_seqs,
        measured=(
            f"headrace {version()}, {datetime.now(UTC).isoformat(timespec='seconds')}, model {size.model}: "
            f"{'the fastest' if grid.fastest else 'medians'} of {grid.repeats}, seed {grid.seed}, "
            f"{grid.answer_tokens} tokens of each answer. The time to first token contains the hand-over and the first "
            "decode step."
        ),
    )
