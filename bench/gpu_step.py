"""Times decode steps with and without Headrace's connector, tokens of many streams, and hand-overs, on one device.

    python -m bench.gpu_step [--device cuda:0] [--model models/tiny-llama-deep] [--dtype bfloat16] [--streams 1,64]
        [--prompt 128] [--answer 256] [--rounds 5] [--cache-gib 2] [--hand-overs 512,1500] [--output bench/results]

All engines run at once, with KV memory of a fixed size, and only one computes at a time. The ways are these:
- vLLM alone, with its defaults.
- vLLM alone, with the model runner that Headrace chooses, where its default may be another one.
- The engine of a decode worker, which computes the prompts itself.
- The services of one prefill and one decode worker. Each prompt is handed over.
In every round each way gets new prompts of its own, in alternating order. A step is the mean time between two tokens
of a stream while all streams run. Then single prompts are handed over. "Exposed" starts when the KV of the last layer
is written at prefill, and ends when decode has all of it. With --device cpu, the figures say nothing about GPUs.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from bench.support.vllm_child import engine, loaded
from bench.support.vllm_ways import (
    CONTEXT_TOKENS,
    Ours,
    alternating,
    engine_arguments,
    ours,
    prompt_of,
    trace_times,
)
from headrace_common.deadlines import Deadline
from headrace_common.errors import StaleIncarnation
from headrace_engine.interface import DecodeTokens, DecodeWork
from headrace_engine.vllm.engine import VllmEngine
from headrace_kv.layout import KvDescriptor, WorkerRef
from tests.decoding import decoded
from tests.devices import CPU, CUDA, machine
from tests.vllm.pair import GREEDY, engine_config

PLAIN: Final = "vLLM alone"
SAME_RUNNER: Final = "vLLM alone, Headrace's model runner"
CONNECTOR: Final = "a decode worker's engine"
SERVICES: Final = "services, prompts handed over"
STEP_RATIO_MAX: Final = 1.02
# Every model of the tests has these tokens.
TOKENS: Final = range(3, 500)
WARM_ROUNDS: Final = 1
STEPS_MIN: Final = 16
TRACE_S: Final = 5.0
TIMEOUT_S: Final = 300.0
_GIB: Final = 1 << 30

# The times of the tokens of an answer of this length, in ns.
Ask = Callable[[list[int], int], Awaitable[list[int]]]


@dataclass(frozen=True, slots=True)
class Block:
    """Streams that ran side by side."""

    step_ms: float
    tokens_per_s: float
    first_ms: float
    """Median time to the first token."""


async def block_of(
    ask: Ask, streams: int, prompt_tokens: int, answer_tokens: int, seed: int
) -> Block:
    """Starts the streams at once. Steps count from when all have begun until the first one ends.

    Where that is too short, it asks again for answers of twice the length.
    """
    prompts = [prompt_of(prompt_tokens, seed + number, TOKENS) for number in range(streams)]
    start_ns = time.time_ns()
    async with asyncio.timeout(TIMEOUT_S):
        answers = await asyncio.gather(*(ask(prompt, answer_tokens) for prompt in prompts))
    begun_ns = max(times[0] for times in answers)
    ended_ns = min(times[-1] for times in answers)
    tokens = sum(begun_ns < time_ns <= ended_ns for times in answers for time_ns in times)
    if tokens < STEPS_MIN * streams:
        if prompt_tokens + 2 * answer_tokens > CONTEXT_TOKENS:
            raise SystemExit(f"{streams} streams did not run side by side for {STEPS_MIN} steps")
        return await block_of(ask, streams, prompt_tokens, 2 * answer_tokens, seed)
    return Block(
        (ended_ns - begun_ns) / 1e6 * streams / tokens,
        tokens * 1e9 / (ended_ns - begun_ns),
        statistics.median((times[0] - start_ns) / 1e6 for times in answers),
    )


@asynccontextmanager
async def plain(
    arguments: argparse.Namespace, log: Path, environment: Mapping[str, str]
) -> AsyncIterator[Ask]:
    """vLLM alone."""
    sizes: dict[str, object] = {"num_gpu_blocks_override": None, "max_num_seqs": seats(arguments)}
    if arguments.device != CPU:
        sizes |= {
            "enforce_eager": False,
            "kv_cache_memory_bytes": int(arguments.cache_gib * _GIB),
            "gpu_memory_utilization": 0.02,
        }
        # Our environment for processors turns compiling off.
        environment = {"TORCH_COMPILE_DISABLE": "0", **environment}
    given = engine_arguments(arguments.model, arguments.dtype, CONTEXT_TOKENS, **sizes)
    async with engine(given, log, environment) as child:
        await loaded(child)

        async def ask(prompt: list[int], count: int) -> list[int]:
            return [
                piece.heard_unix_ns
                async for piece in child.generate(prompt, count)
                for _ in piece.token_ids
            ]

        yield ask


@asynccontextmanager
async def with_connector(arguments: argparse.Namespace) -> AsyncIterator[Ask]:
    """The engine of a decode worker, without a hand-over."""

    async def descriptors(ref: WorkerRef, deadline: Deadline) -> KvDescriptor:
        raise StaleIncarnation(f"{ref} is not here")

    config = engine_config(
        "decode",
        model=str(arguments.model),
        dtype=arguments.dtype,
        num_gpu_blocks_override=0,
        block_size=0,
        kv_cache_gib=arguments.cache_gib,
        max_model_len=CONTEXT_TOKENS,
        max_num_seqs=seats(arguments),
        max_num_batched_tokens=CONTEXT_TOKENS,
    )
    numbers = itertools.count(1)
    measured = VllmEngine(config, descriptors)

    async def ask(prompt: list[int], count: int) -> list[int]:
        sampling = replace(GREEDY, max_tokens=count)
        work = DecodeWork(f"x{next(numbers):032d}", tuple(prompt), sampling, remote_kv=False)
        return [
            time.time_ns()
            async for event in decoded(measured, work)
            if isinstance(event, DecodeTokens)
            for _ in event.token_ids
        ]

    try:
        measured.launch()
        await measured.attach()
        yield ask
    finally:
        await measured.close()


def by_services(deployment: Ours) -> Ask:
    """A prefill worker and a decode worker behind a router."""

    async def ask(prompt: list[int], count: int) -> list[int]:
        return [
            heard_ns
            async for response, heard_ns in deployment.generate(prompt, count)
            for _ in response.token_ids
        ]

    return ask


def seats(arguments: argparse.Namespace) -> int:
    """Requests that an engine runs at a time."""
    return int(max(arguments.streams))


async def hand_over(deployment: Ours, prompt_tokens: int, seed: int) -> tuple[float, ...]:
    """Milliseconds of hand-over, transfer, exposed transfer, its lateness and prefill of a prompt."""
    trace_id = ""
    prompt = prompt_of(prompt_tokens, seed, TOKENS)
    async for response, _ in deployment.generate(prompt, 4):
        trace_id = trace_id or response.trace_id
    return trace_times(await deployment.operator.trace(trace_id, TRACE_S))


async def measure(arguments: argparse.Namespace, folder: Path) -> str:
    """Starts all engines, measures, and gives the tables."""
    async with AsyncExitStack() as stack:
        asks: dict[str, Ask] = {}
        # First, because it forks its engine, which must happen before this process uses gRPC.
        connector = await stack.enter_async_context(with_connector(arguments))
        asks[PLAIN] = await stack.enter_async_context(plain(arguments, folder / "plain.log", {}))
        if arguments.device != CPU:
            same = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
            started = plain(arguments, folder / "same.log", same)
            asks[SAME_RUNNER] = await stack.enter_async_context(started)
        asks[CONNECTOR] = connector
        deployment = await stack.enter_async_context(
            ours(
                arguments.model,
                arguments.dtype,
                CONTEXT_TOKENS,
                folder / "ours",
                # The size in GiB counts.
                num_gpu_blocks_override="0",
                kv_cache_gib=f"{arguments.cache_gib:g}",
                max_num_seqs=str(seats(arguments)),
            )
        )
        asks[SERVICES] = by_services(deployment)
        steps = [await repeat(asks, streams, arguments) for streams in arguments.streams]
        rows = [
            [
                await hand_over(deployment, length, 10**6 * number + length)
                for number in range(arguments.rounds + WARM_ROUNDS)
            ][WARM_ROUNDS:]
            for length in arguments.hand_overs
        ]
    tables = [step_table(one, arguments.streams[at]) for at, one in enumerate(steps)]
    return "\n\n".join(
        [*tables, hand_over_table(dict(zip(arguments.hand_overs, rows, strict=True)))]
    )


async def repeat(
    asks: Mapping[str, Ask], streams: int, arguments: argparse.Namespace
) -> dict[str, list[Block]]:
    """The blocks of each way, without those of the warm-up."""
    blocks: dict[str, list[Block]] = {way: [] for way in asks}
    for number in range(arguments.rounds + WARM_ROUNDS):
        for way in alternating(list(asks), number):
            seed = 1000 * (number * len(asks) + list(asks).index(way)) + 10**8 * streams
            found = await block_of(asks[way], streams, arguments.prompt, arguments.answer, seed)
            if number >= WARM_ROUNDS:
                blocks[way].append(found)
    return blocks


def step_table(blocks: Mapping[str, list[Block]], streams: int) -> str:
    """A row for each way."""
    lines = [
        f"| streams side by side: {streams} | step, ms | beside vLLM alone | tokens/s | TTFT, ms |",
        "|---|---|---|---|---|",
    ]
    reference = blocks.get(SAME_RUNNER, blocks[PLAIN])
    for way, found in blocks.items():
        figures = [
            spread([one.step_ms for one in found], 3),
            f"{ratio(found, reference):.3f}",
            spread([one.tokens_per_s for one in found], 0),
            spread([one.first_ms for one in found], 1),
        ]
        lines.append(f"| {' | '.join([way, *figures])} |")
    cost = ratio(blocks[CONNECTOR], reference)
    met = "met" if cost <= STEP_RATIO_MAX else "MISSED"
    lines += ["", f"Step with the connector {cost:.3f}, wanted {STEP_RATIO_MAX} at most: {met}"]
    return "\n".join(lines)


def ratio(one: list[Block], other: list[Block]) -> float:
    """The median ratio of steps, round by round."""
    return statistics.median(
        ours.step_ms / theirs.step_ms for ours, theirs in zip(one, other, strict=True)
    )


def hand_over_table(found: Mapping[int, list[tuple[float, ...]]]) -> str:
    """A row for each length of the prompts."""
    lines = [
        "| prompt, tokens | prefill, ms | transfer, ms | exposed, ms |",
        "|---|---|---|---|",
    ]
    for length, times in found.items():
        _, moving, exposed, _, prefill = zip(*times, strict=True)
        figures = [spread(list(one), 2) for one in (prefill, moving, exposed)]
        lines.append(f"| {' | '.join([str(length), *figures])} |")
    return "\n".join(lines)


def spread(values: list[float], digits: int) -> str:
    """Median and range."""
    form = f",.{digits}f"
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def numbers(text: str) -> list[int]:
    return [int(one) for one in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description="See the module's text.")
    parser.add_argument("--device", choices=(CUDA, CPU), default=CUDA)
    parser.add_argument("--model", type=Path, default=Path("models/tiny-llama-deep"))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--streams", type=numbers, default=[1, 64], help="streams side by side")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--answer", type=int, default=256, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cache-gib", type=float, default=2.0, help="KV memory of each engine")
    parser.add_argument("--hand-overs", type=numbers, default=[512, 1500], help="tokens of prompts")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    with TemporaryDirectory(prefix="headrace-gpu-step-") as folder:
        drawn = asyncio.run(measure(arguments, Path(folder)))
    head = f"{machine(arguments.device)}. {arguments.model.name}, {arguments.dtype}."
    print(f"{head}\n\n{drawn}")
    if arguments.output:
        arguments.output.mkdir(parents=True, exist_ok=True)
        title = "# Steps with and without the connector, and hand-overs, on one device"
        made = f"{head} Made by `python -m bench.gpu_step`."
        (arguments.output / "gpu_step.md").write_text(f"{title}\n\n{made}\n\n{drawn}\n")


if __name__ == "__main__":
    main()
