"""Goodput of engines at the pace of GPUs: Headrace, vLLM's own pairs, and plain vLLM, one way after the other.

    python -m bench.goodput [--ways plain-least,mooncake-3-1,pools-3-1,both] [--rates 2.75,3.5 | --search 1,6]
        [--load plain] [--seeds 0] [--starts 3] [--faults killed,frozen,drained,joins] [further options: --help]

Engines are real ones. Their steps and writes take as long as those of an accelerator (bench/gpu_pace). The ways are in
ways.py, and the loads in load.py. Every way gets the same requests. A request is good when it keeps two bounds: of its
time to the first token, and of its mean time per later token. Bounds are multiples of what the pace says for a prompt
of 4,096 tokens alone. Workers of both roles get them with each request. So they are measured for each pair of bounds,
unless requests of the load have their own. --before is what a way gets before its first block. After a cold start it
has seen nothing, or prompts of one length. With --starts, engines start so many times for each of these. Each start has
seeds of its own. A request that has not ended --drain seconds after the last arrival has failed. With --search, a way's
goodput for --bounds is searched for between two rates, to 5 %. The load `handover` has one request at a time, beside
three answers. --faults has workers of both roles alone, with the --bounds: one is lost, or one joins. --keep adds the
blocks to a file. --report also reports on those in other files, and with --ways= on nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import psutil

from bench.goodput.faults import FAULTS, Faults, faults_table
from bench.goodput.intervals import ATTAINED_MIN, DRAWS
from bench.goodput.load import LENGTHS, LOADS, Arrival, Ask, arrivals, send, send_alone
from bench.goodput.report import (
    FACTORS,
    Answer,
    Block,
    Factors,
    Objective,
    asked_factors,
    attained,
    day_table,
    goodput_table,
    handover_table,
    next_rate,
    starts_table,
    times_table,
)
from bench.goodput.ways import Engines, by_both
from bench.gpu_pace.accelerators import ACCELERATORS, Pace, paced_model

ALONE_TOKENS: Final = 4_096
_WARM_S: Final = 20.0
_WARM_RATE: Final = 0.3
"""Requests of each engine in a second while a way warms up."""
_BOTH: Final = ("both", "both-http", "planned")
HANDOVER: Final = "handover"
_COUNT_S: Final = 2.0
_FAULT_SEEDS: Final = 1_000
BEFORE: Final[dict[str, Callable[[float], Sequence[Arrival]]]] = {
    "mixed": lambda rate: arrivals("plain", rate, _WARM_S, -1),
    "one": lambda rate: [
        Arrival(number / rate, prompt_tokens=1_000, answer_tokens=64, seed=number)
        for number in range(12)
    ],
    "nothing": lambda rate: [],
}
"""What a way gets before its first block: requests of all lengths, prompts of one length, or nothing."""


class Steps:
    """The times of the steps that engines have written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}

    def since(self) -> tuple[float, int]:
        """The time of all steps since the last call over the modelled one, and the prompt tokens that they computed."""
        modelled_ms = taken_ms = 0.0
        tokens = 0
        for file in self._folder.iterdir():
            text = file.read_text()
            for line in text[self._read.get(file, 0) :].splitlines():
                modelled, taken, computed = line.split(",")
                modelled_ms, taken_ms = modelled_ms + float(modelled), taken_ms + float(taken)
                tokens += int(computed)
            self._read[file] = len(text)
        return (taken_ms / modelled_ms if modelled_ms else 0.0), tokens


async def count_engines(counts: list[int]) -> None:
    """Adds the number of engines that run, again and again."""
    while True:
        running = psutil.Process().children(recursive=True)
        counts.append(sum(one.name().startswith("VLLM::Engine") for one in running))
        await asyncio.sleep(_COUNT_S)


class Bench:
    """Measures ways at one pace."""

    def __init__(self, arguments: argparse.Namespace, pace: Pace, folder: Path) -> None:
        self._arguments = arguments
        self._folder = folder
        self._steps = Steps(folder / "steps")
        self.alone = alone_of(pace, arguments.step)

    async def way(self, way: str) -> list[Block]:
        """All blocks of a way."""
        arguments = self._arguments
        return [
            block
            for before in arguments.before.split(",")
            for start in range(arguments.starts or 1)
            for block in await self._start(way, before, start)
        ]

    async def _start(self, way: str, before: str, start: int) -> list[Block]:
        """The blocks after one start of the engines."""
        arguments = self._arguments
        kind, _, step = way.partition("@")
        engines = self._engines(f"{way}-{before}-{start}", int(step or arguments.step))
        seeds = [start + int(seed) for seed in arguments.seeds.split(",")]
        async with AsyncExitStack() as stack:
            ask = await engines.start(stack, kind)
            await self._warm(ask, before)
            if arguments.search:
                return await self._search(ask, way)
            if arguments.load == HANDOVER:
                return [await self._handover(ask, way, seed) for seed in seeds]
            return [
                block
                for seed in seeds
                for rate in map(float, arguments.rates.split(","))
                for block in await self._blocks(ask, way, rate, seed, before)
            ]

    async def faults(self) -> list[Block]:
        """Workers of both roles, with a fault in each block."""
        arguments = self._arguments
        engines = self._engines("faults", arguments.step)
        factors = FACTORS[arguments.bounds]
        async with AsyncExitStack() as stack:
            workers = await engines.headrace(stack, engines.topology(0, 0, arguments.engines))
            faults, ask = Faults(workers, arguments.engines), by_both(workers)
            blocks = []
            for number, fault in enumerate(arguments.faults.split(",")):
                # Prompts of an earlier block would be cached.
                for seed in (
                    _FAULT_SEEDS * number + int(one) for one in arguments.seeds.split(",")
                ):
                    for rate in map(float, arguments.rates.split(",")):
                        await faults.prepare(fault)
                        await self._warm(ask, arguments.before)
                        caused = asyncio.create_task(faults.cause(fault))
                        block = await self._block(ask, "both", rate, seed, factors, fault=fault)
                        await caused
                        blocks.append(block)
                        await faults.repair()
            return blocks

    def _engines(self, name: str, step_tokens: int) -> Engines:
        arguments = self._arguments
        folder = self._folder / name
        return Engines(
            paced_model(), arguments.engines, step_tokens, folder, arguments.cache, self.alone
        )

    async def _warm(self, ask: Ask, before: str) -> None:
        arriving = BEFORE[before](_WARM_RATE * self._arguments.engines)
        await send(ask, with_factors(arriving, FACTORS[1]), self._arguments.drain, self.alone.times)

    async def _search(self, ask: Ask, way: str) -> list[Block]:
        low, high = map(float, self._arguments.search.split(","))
        factors = FACTORS[self._arguments.bounds]
        blocks: list[Block] = []
        shares: dict[float, float] = {}
        while (rate := next_rate(shares, low, high)) is not None:
            seeds = map(int, self._arguments.seeds.split(","))
            blocks += [await self._block(ask, way, rate, seed, factors) for seed in seeds]
            answers = [a for block in blocks if block.rate == rate for a in block.answers]
            shares[rate] = attained(answers, self.alone, factors)
        return blocks

    async def _blocks(self, ask: Ask, way: str, rate: float, seed: int, before: str) -> list[Block]:
        own = self._arguments.load == "mixed"
        chosen = [FACTORS[int(one)] for one in self._arguments.bounds_of.split(",")]
        needed: Sequence[Factors | None] = chosen if way in _BOTH and not own else [None]
        return [
            await self._block(ask, way, rate, seed, factors, before=before) for factors in needed
        ]

    async def _handover(self, ask: Ask, way: str, seed: int) -> Block:
        arguments = self._arguments
        self._begin()
        answers = await send_alone(
            ask, arguments.seconds, seed, self.alone.tpot_ms, self.alone.times
        )
        return self._end(Block(way, HANDOVER, 0.0, seed, tuple(answers), 0.0, 0.0))

    async def _block(
        self,
        ask: Ask,
        way: str,
        rate: float,
        seed: int,
        factors: Factors | None,
        *,
        before: str = "mixed",
        fault: str = "",
    ) -> Block:
        arguments = self._arguments
        arriving = arrivals(arguments.load, rate, arguments.seconds, seed)
        if factors is not None:
            # Engines of this way have seen the prompts with other bounds.
            arriving = with_factors(arriving, factors)
        self._begin()
        engines: list[int] = []
        counting = asyncio.create_task(count_engines(engines)) if arguments.load == "day" else None
        answers = await send(ask, arriving, arguments.drain, self.alone.times)
        if counting is not None:
            counting.cancel()
        block = Block(way, arguments.load, rate, seed, tuple(answers), 0.0, 0.0)
        return self._end(replace(block, before=before, fault=fault, engines=tuple(engines)))

    def _begin(self) -> None:
        self._steps.since()
        psutil.cpu_times_percent()

    def _end(self, block: Block) -> Block:
        """The block with what was measured since it began. Keeps it."""
        stretch, tokens = self._steps.since()
        idle = psutil.cpu_times_percent().idle / 100
        block = replace(block, idle=idle, stretch=stretch, computed_tokens=tokens)
        factors = asked_factors(block.answers)
        shares = " ".join(
            f"{100 * attained(block.answers, self.alone, one):.0f} %" for one in FACTORS
        )
        print(
            f"{block.way}, {block.fault or block.load}, {block.rate:g}/s, seed {block.seed}, before {block.before}, "
            f"{factors}: {len(block.answers)} requests, good {shares}, cached {block.cached:.2f}, idle {idle:.2f}, "
            f"steps {stretch:.3f}",
            file=sys.stderr,
            flush=True,
        )
        if self._arguments.keep:
            with self._arguments.keep.open("a") as kept:
                kept.write(json.dumps(asdict(block)) + "\n")
        return block


def with_factors(arriving: Sequence[Arrival], factors: Factors) -> list[Arrival]:
    """The same requests with these bounds, and with texts of their own: prompts may be cached."""
    number = FACTORS.index(factors)
    return [
        replace(
            one, factors=factors, seed=one.seed + number, shared_seed=one.shared_seed + 100 * number
        )
        for one in arriving
    ]


def alone_of(pace: Pace, step_tokens: int) -> Objective:
    """The times of a request alone: to the first token of its prompt, and of each later token."""
    return Objective(pace.prompt_ms(ALONE_TOKENS, step_tokens), pace.taken_ms((), [ALONE_TOKENS]))


def kept_in(file: Path) -> list[Block]:
    """The blocks of a file of --keep."""
    return [_block(json.loads(line)) for line in file.read_text().splitlines()]


def _block(kept: dict[str, Any]) -> Block:
    answers = tuple(
        Answer(
            tuple(one["token_ms"]),
            failed=one["failed"],
            prompt_tokens=one["prompt_tokens"],
            factors=tuple(one["factors"]) if one["factors"] else None,
            due_s=one.get("due_s", 0.0),
        )
        for one in kept.pop("answers")
    )
    return Block(**{**kept, "engines": tuple(kept.get("engines", ()))}, answers=answers)


_NOTES: Final = """# Goodput at the pace of GPUs{load_title}

{what} Made by `python -m bench.goodput`.

{tables}

Engines are vLLM's on processors. Their steps and KV writes take as long as on the accelerator, `slowness` times slower
(bench/gpu_pace). Schedulers, connectors, services and transfers are real. A block is valid when at least 20 % of the
processors were idle, and steps took at most 1.05 times their modelled time. Times count from the moment that a request
is due. vLLM's engines are called through pipes, ours by gRPC at the router. A request that the router refuses, because
its first token would be late, counts as failed.
{remark}"""
_GOODPUT: Final = """The share of good requests: those that kept both bounds. Bounds are multiples of the times of a
prompt of {alone:,} tokens alone by the pace. Goodput is the rate at which this share falls through {share:.0f} %, on
lines between the measured rates. The last column has the difference from the best other way with its 95 % interval:
a bootstrap over seeds and requests, which are the same for both ways ({draws:,} draws).

{table}"""


def tables_of(arguments: argparse.Namespace, pace: Pace, blocks: list[Block]) -> str:
    """What is reported of the blocks."""
    alone = alone_of(pace, arguments.step)
    faults = [block for block in blocks if block.fault]
    blocks = [block for block in blocks if block.load == arguments.load and not block.fault]
    parts = []
    if faults:
        parts.append(faults_table(faults, alone))
    elif arguments.load == HANDOVER:
        prompt_ms = {tokens: pace.prompt_ms(tokens, arguments.step) for tokens in LENGTHS}
        parts.append(handover_table(blocks, prompt_ms, alone.tpot_ms))
    elif arguments.load == "day":
        parts.append(day_table(blocks, alone))
    elif arguments.starts:
        parts.append(starts_table(blocks))
    else:
        table = goodput_table(blocks, alone)
        parts.append(
            _GOODPUT.format(alone=ALONE_TOKENS, share=100 * ATTAINED_MIN, draws=DRAWS, table=table)
        )
    if blocks and arguments.load != HANDOVER:
        title = f"Times of the same requests. A step with one answer takes {alone.tpot_ms:.0f} ms:"
        parts += [title, times_table(blocks)]
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description="See the module's text.")
    parser.add_argument("--ways", default="plain-least,mooncake-3-1,pools-3-1,both")
    parser.add_argument("--rates", default="2.75,3.5", help="requests per second")
    parser.add_argument("--search", default="", help="two rates: searches for the goodput between")
    parser.add_argument("--bounds", type=int, default=1, help="of a search and faults: 0 to 3")
    parser.add_argument("--bounds-of", default="0,1,2,3", help="of workers of both roles")
    parser.add_argument("--accelerator", choices=ACCELERATORS, default="70b-4xh100")
    parser.add_argument("--slowness", type=float, default=4.0)
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--cache", type=int, default=400_000, help="tokens of an engine's KV")
    parser.add_argument(
        "--step", type=int, default=2048, help="tokens of a step; WAY@512 has another"
    )
    parser.add_argument(
        "--before", default="mixed", help=f"what a way gets first: {', '.join(BEFORE)}"
    )
    parser.add_argument("--starts", type=int, default=0, help="of the engines, for each --before")
    parser.add_argument("--faults", default="", help=f"of workers: {', '.join(FAULTS)}")
    parser.add_argument("--load", choices=[*LOADS, HANDOVER], default="plain")
    parser.add_argument("--seconds", type=float, default=30.0, help="of arrivals in a block")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--drain", type=float, default=30.0, help="seconds after the last arrival")
    parser.add_argument("--keep", type=Path, help="file to which the blocks are added")
    parser.add_argument(
        "--report", type=Path, nargs="+", default=[], help="files of earlier blocks"
    )
    parser.add_argument("--remark", default="", help="what else is to be said of the run")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    pace = ACCELERATORS[arguments.accelerator].slower(arguments.slowness)
    blocks = [block for file in arguments.report for block in kept_in(file)]
    if arguments.keep and arguments.keep.exists():
        blocks += kept_in(arguments.keep)
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "steps").mkdir()
        os.environ.update(pace.variables(folder / "steps"))
        bench = Bench(arguments, pace, folder)
        if arguments.faults and arguments.ways:
            blocks += asyncio.run(bench.faults())
        for way in () if arguments.faults else filter(None, arguments.ways.split(",")):
            blocks += asyncio.run(bench.way(way))
    tables = tables_of(arguments, pace, blocks)
    print(tables)
    if arguments.output:
        arguments.output.mkdir(parents=True, exist_ok=True)
        what = (
            f"{arguments.accelerator}, slowness {arguments.slowness:g}, {arguments.engines} engines, steps of "
            f"{arguments.step} tokens, load `{arguments.load}`, arrivals during {arguments.seconds:g} s a block."
        )
        kind = "faults" if arguments.faults else "starts" if arguments.starts else arguments.load
        text = _NOTES.format(
            load_title="" if kind == "plain" else f": {kind}",
            what=what,
            tables=tables,
            remark=f"\n{arguments.remark}\n" if arguments.remark else "",
        )
        suffix = "" if kind == "plain" else f"_{kind}"
        (arguments.output / f"goodput{suffix}.md").write_text(text)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
