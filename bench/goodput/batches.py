"""Urgent requests with and without a batch beside them, on workers of both roles at the pace of GPUs.

    python -m bench.goodput.batches [--rate 0.6] [--seconds 50] [--seeds 1,2,3] [--bounds 1,2] [--output bench/results]

Each pair of blocks has the same arrivals: one without a batch, one beside lines of a batch of --lines. A block without
urgent requests shows the lines alone. What is left to a batch is that rate, less the share of prompt tokens that the
urgent requests have of it. The bounds are those of bench.goodput. An urgent request may end at any time, so a late one
is not taken for a lost one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np
import openai

from bench.goodput.__main__ import Steps, alone_of, with_factors
from bench.goodput.load import Arrival, Ask, arrivals, send
from bench.goodput.report import FACTORS, Objective
from bench.goodput.ways import Engines, by_both
from bench.gpu_pace.accelerators import ACCELERATORS, paced_model
from headrace_frontend.openai.batches.lines import LINES_MAX

STEP_TOKENS: Final = 2_048
DRAWS: Final = 1_000
_HEADER: Final = (
    "| bounds: first token, later tokens | good without a batch | good beside one, and the difference "
    "| lines/s | of what is left | longest stretch of steps |"
)
_PROMPTS: Final = (200, 1_000)
_ANSWERS: Final = (32, 128)
_DRAIN_S: Final = 120.0
_SETTLE_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Block:
    """What one block measured. `good` has each urgent request in the order of arrivals."""

    good: Sequence[bool]
    lines_per_s: float
    tokens_per_s: float
    stretch: float


class Bench:
    """Two workers of both roles with a router that takes batches."""

    def __init__(self, arguments: argparse.Namespace, alone: Objective, steps: Steps) -> None:
        self._arguments, self._alone, self._steps = arguments, alone, steps
        self._ask: Ask
        self._client: openai.AsyncOpenAI
        self._model = ""

    async def start(self, stack: AsyncExitStack, folder: Path) -> None:
        """Starts the services, and sends some requests for the times of their steps."""
        model = paced_model()
        engines = Engines(model, self._arguments.engines, STEP_TOKENS, folder, 400_000, self._alone)
        engines.folder.mkdir()
        topology = engines.topology(0, 0, self._arguments.engines)
        batches = ("router", "batch_folder", str(folder / "batches"))
        topology = replace(topology, settings=(*topology.settings, batches))
        workers = await engines.headrace(stack, topology)
        self._ask = by_both(workers)
        client = openai.AsyncOpenAI(base_url=f"http://{topology.http_listen}/v1", api_key="none")
        self._client = await stack.enter_async_context(client)
        self._model = (await client.models.list()).data[0].id
        warm = [Arrival(1.5 * i, 1_500 + 300 * (i % 5), 64, 900 + i) for i in range(10)]
        await send(self._ask, with_factors(warm, FACTORS[1]), _DRAIN_S, self._alone.times)

    async def block(self, seed: int, bounds: int | None, *, batch: bool) -> Block:
        """Urgent requests with these bounds, none without bounds."""
        factors = FACTORS[bounds or 0]
        arriving: list[Arrival] = []
        if bounds is not None:
            found = arrivals("plain", self._arguments.rate, self._arguments.seconds, seed)
            # No block may find the prompts of another one cached.
            found = [replace(one, seed=one.seed + batch) for one in found]
            arriving = with_factors(found, factors)
        batch_id = await self._begin(seed) if batch else ""
        sending = send(self._ask, arriving, _DRAIN_S, self._alone.times)
        answers, rates = await asyncio.gather(sending, self._rates(batch_id))
        await self._end(batch_id)
        good = [one.keeps(self._alone.times(factors)) for one in answers]
        return Block(good, *rates)

    async def _rates(self, batch_id: str) -> tuple[float, float, float]:
        """Lines and prompt tokens in a second while requests arrive, and the stretch of the steps."""
        self._steps.since()
        begin_s, begin_lines = time.monotonic(), await self._answered(batch_id)
        await asyncio.sleep(self._arguments.seconds)
        taken_s = time.monotonic() - begin_s
        lines = await self._answered(batch_id) - begin_lines
        stretch, tokens = self._steps.since()
        return lines / taken_s, tokens / taken_s, stretch

    def _lines(self, seed: int) -> str:
        numbers = random.Random(f"batch/{seed}/{time.monotonic_ns()}")
        body = {"model": self._model, "ignore_eos": True, "temperature": 0}
        return "\n".join(
            json.dumps(
                {
                    "custom_id": str(number),
                    "method": "POST",
                    "url": "/v1/completions",
                    "body": body
                    | {
                        "prompt": numbers.choices(range(3, 512), k=numbers.randint(*_PROMPTS)),
                        "max_tokens": numbers.randint(*_ANSWERS),
                    },
                }
            )
            for number in range(self._arguments.lines)
        )

    async def _begin(self, seed: int) -> str:
        """Starts a batch, and waits until its lines run."""
        data = ("lines.jsonl", self._lines(seed).encode())
        file = await self._client.files.create(file=data, purpose="batch")
        batch = await self._client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
        await asyncio.sleep(_SETTLE_S)
        return batch.id

    async def _answered(self, batch_id: str) -> int:
        if not batch_id:
            return 0
        counts = (await self._client.batches.retrieve(batch_id)).request_counts
        if counts is None or counts.failed:
            raise SystemExit(f"lines of {batch_id} have failed: {counts}")
        return counts.completed

    async def _end(self, batch_id: str) -> None:
        if not batch_id:
            return
        if (await self._client.batches.retrieve(batch_id)).status == "completed":
            raise SystemExit("the batch ended before the block; give it more --lines")
        await self._client.batches.cancel(batch_id)
        async with asyncio.timeout(_DRAIN_S):
            while (await self._client.batches.retrieve(batch_id)).status != "cancelled":  # noqa: ASYNC110
                await asyncio.sleep(0.2)


def difference(without: Sequence[bool], beside: Sequence[bool]) -> tuple[float, float, float]:
    """The share of good requests beside a batch less that without, and its 95 % interval over the same requests."""
    found = np.array(beside, dtype=float) - np.array(without, dtype=float)
    drawn = np.random.default_rng(0).integers(0, len(found), (DRAWS, len(found)))
    low, high = np.quantile(found[drawn].mean(axis=1), (0.025, 0.975))
    return float(found.mean()), float(low), float(high)


async def measure(arguments: argparse.Namespace, folder: Path) -> list[str]:
    """The rows of the table."""
    pace = ACCELERATORS["70b-4xh100"].slower(4.0)
    (folder / "steps").mkdir()
    os.environ.update(pace.variables(folder / "steps"))
    bench = Bench(arguments, alone_of(pace, STEP_TOKENS), Steps(folder / "steps"))
    rows = []
    async with AsyncExitStack() as stack:
        await bench.start(stack, folder / "services")
        alone = await bench.block(0, None, batch=True)
        rows.append(f"| no urgent requests | | | {alone.lines_per_s:.2f} | | {alone.stretch:.3f} |")
        for bounds in map(int, arguments.bounds.split(",")):
            without: list[Block] = []
            beside: list[Block] = []
            for seed in map(int, arguments.seeds.split(",")):
                without.append(await bench.block(seed, bounds, batch=False))
                beside.append(await bench.block(seed, bounds, batch=True))
                print(seed, FACTORS[bounds], without[-1], beside[-1], flush=True)
            good = [[one for block in blocks for one in block.good] for blocks in (without, beside)]
            change, low, high = difference(*good)
            urgent_tokens = np.mean([one.tokens_per_s for one in without])
            left = alone.lines_per_s * (1 - urgent_tokens / alone.tokens_per_s)
            lines = float(np.mean([one.lines_per_s for one in beside]))
            counts = [f"{sum(one)} of {len(one)}" for one in good]
            factors = " x, ".join(f"{one:g}" for one in FACTORS[bounds])
            change_text = f"{100 * change:+.1f} ({100 * low:+.1f} to {100 * high:+.1f}) points"
            stretch = max(one.stretch for one in beside)
            rows.append(
                f"| {factors} x | {counts[0]} | {counts[1]}: {change_text} | {lines:.2f} | {lines / left:.2f} "
                f"| {stretch:.3f} |"
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="See the module's text.")
    parser.add_argument("--rate", type=float, default=0.6, help="urgent requests per second")
    parser.add_argument("--seconds", type=float, default=50.0, help="of arrivals in a block")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--bounds", default="1,2", help="of the urgent requests: 0 to 3")
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--lines", type=int, default=2_000, help=f"at most {LINES_MAX}")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    with TemporaryDirectory() as name:
        rows = asyncio.run(measure(arguments, Path(name)))
    table = "\n".join((_HEADER, "|---|---|---|---|---|---|", *rows))
    print(table)
    if arguments.output:
        text = (
            "# Batches beside urgent requests\n\nMade by `python -m bench.goodput.batches`: "
            f"{arguments.engines} workers of both roles at the pace of four H100s with a model of 70 billion "
            f"parameters, four times slower. {arguments.rate:g} urgent requests per second, for "
            f"{arguments.seconds:g} s a block, seeds {arguments.seeds}. Lines have prompts of 200 to 1,000 tokens and "
            f"answers of 32 to 128. Bounds are multiples of the times of a request alone. The interval is one of "
            f"95 %.\n\n{table}\n"
        )
        (arguments.output / "batches.md").write_text(text)


if __name__ == "__main__":
    main()
