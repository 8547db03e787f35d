"""Goodput of engines at the pace of GPUs: Headrace, vLLM's own pairs, and plain vLLM, one way after the other.

    python -m bench.goodput [--ways plain-least,mooncake-3-1,pools-3-1,both] [--rates 2.75,3.5 | --search 1,6]
        [--accelerator 70b-4xh100] [--slowness 4] [--engines 4] [--load plain] [--seconds 30] [--seeds 0]
        [--keep FILE] [--output bench/results]

Engines are real ones. Their steps and writes take as long as those of an accelerator (bench/gpu_pace). The ways are in
ways.py, and the loads in load.py. Every way gets the same requests. A request is good when it keeps two bounds: of its
time to the first token, and of its mean time per later token. Bounds are multiples of what the pace says for a prompt
of 4,096 tokens alone. Workers of both roles get them with each request. So they are measured for each pair of bounds,
unless requests of the load have their own. --before is what a way gets before its first block. After a cold start it
has seen nothing, or prompts of one length. A request that has not ended --drain seconds after the last arrival has
failed. With --search, a way's goodput for --bounds is searched for between two rates, to 5 %. --keep adds the blocks to
those in FILE, and reports on all of them.
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

from bench.goodput.load import LOADS, Arrival, Ask, arrivals, send
from bench.goodput.report import (
    ATTAINED_MIN,
    FACTORS,
    Answer,
    Block,
    Factors,
    Objective,
    attained,
    goodput_table,
    next_rate,
    times_table,
)
from bench.goodput.ways import Engines
from bench.gpu_pace.accelerators import ACCELERATORS, Pace, paced_model

ALONE_TOKENS: Final = 4_096
_WARM_S: Final = 20.0
_WARM_RATE: Final = 0.3
"""Requests of each engine in a second while a way warms up."""
_BOTH: Final = ("both", "both-http")
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

    def stretch(self) -> float:
        """The time of all steps since the last call over the modelled one."""
        modelled_ms = taken_ms = 0.0
        for file in self._folder.iterdir():
            text = file.read_text()
            for line in text[self._read.get(file, 0) :].splitlines():
                modelled, taken = map(float, line.split(","))
                modelled_ms, taken_ms = modelled_ms + modelled, taken_ms + taken
            self._read[file] = len(text)
        return taken_ms / modelled_ms if modelled_ms else 0.0


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
        kind, _, step = way.partition("@")
        step_tokens = int(step or arguments.step)
        engines = Engines(paced_model(), arguments.engines, step_tokens, self._folder / way)
        async with AsyncExitStack() as stack:
            ask = await engines.start(stack, kind)
            before = BEFORE[arguments.before](_WARM_RATE * arguments.engines)
            await send(ask, with_factors(before, FACTORS[1]), arguments.drain, self.alone.times)
            if arguments.search:
                return await self._search(ask, way)
            return [
                block
                for seed in map(int, arguments.seeds.split(","))
                for rate in map(float, arguments.rates.split(","))
                for block in await self._blocks(ask, way, rate, seed)
            ]

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

    async def _blocks(self, ask: Ask, way: str, rate: float, seed: int) -> list[Block]:
        own = self._arguments.load == "mixed"
        chosen = [FACTORS[int(one)] for one in self._arguments.bounds_of.split(",")]
        needed: Sequence[Factors | None] = chosen if way in _BOTH and not own else [None]
        return [await self._block(ask, way, rate, seed, factors) for factors in needed]

    async def _block(
        self, ask: Ask, way: str, rate: float, seed: int, factors: Factors | None
    ) -> Block:
        arguments = self._arguments
        arriving = arrivals(arguments.load, rate, arguments.seconds, seed)
        if factors is not None:
            # Engines of this way have seen the prompts with other bounds.
            arriving = with_factors(arriving, factors)
        self._steps.stretch()
        psutil.cpu_times_percent()
        answers = await send(ask, arriving, arguments.drain, self.alone.times)
        block = Block(
            way,
            arguments.load,
            rate,
            seed,
            tuple(answers),
            idle=psutil.cpu_times_percent().idle / 100,
            stretch=self._steps.stretch(),
        )
        shares = " ".join(f"{100 * attained(answers, self.alone, one):.0f} %" for one in FACTORS)
        print(
            f"{way} {rate:g}/s, seed {seed}, {factors}: {len(answers)} requests, good {shares}, idle {block.idle:.2f}, "
            f"steps {block.stretch:.3f}",
            file=sys.stderr,
            flush=True,
        )
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


def with_earlier(file: Path | None, blocks: list[Block]) -> list[Block]:
    """The blocks in the file and these. Adds these to the file."""
    if file is None:
        return blocks
    with file.open("a") as kept:
        kept.writelines(json.dumps(asdict(block)) + "\n" for block in blocks)
    return [_block(json.loads(line)) for line in file.read_text().splitlines()]


def _block(kept: dict[str, Any]) -> Block:
    answers = tuple(
        Answer(
            tuple(one["token_ms"]),
            failed=one["failed"],
            prompt_tokens=one["prompt_tokens"],
            factors=tuple(one["factors"]) if one["factors"] else None,
        )
        for one in kept.pop("answers")
    )
    return Block(**kept, answers=answers)


_NOTES: Final = """# Goodput at the pace of GPUs{load_title}

{what} Made by `python -m bench.goodput`.

The share of good requests: those that kept both bounds. Bounds are multiples of the times of a prompt of {alone:,}
tokens alone by the pace. Goodput is the highest rate up to which {share:.0f} % of the requests were good.

{goodput}

Times of the same requests. A step with one answer takes {step_ms:.0f} ms:

{times}

Engines are vLLM's on processors. Their steps and KV writes take as long as on the accelerator, `slowness` times slower
(bench/gpu_pace). Schedulers, connectors, services and transfers are real. A block is valid when at least 20 % of the
processors were idle, and steps took at most 1.05 times their modelled time. Times count from the moment that a request
is due. vLLM's engines are called through pipes, ours by gRPC at the router. A request that the router refuses, because
its first token would be late, counts as failed.
{remark}"""


def main() -> None:
    parser = argparse.ArgumentParser(description="See the module's text.")
    parser.add_argument("--ways", default="plain-least,mooncake-3-1,pools-3-1,both")
    parser.add_argument("--rates", default="2.75,3.5", help="requests per second")
    parser.add_argument("--search", default="", help="two rates: searches for the goodput between")
    parser.add_argument("--bounds", type=int, default=1, help="of a search: 0 to 3")
    parser.add_argument("--bounds-of", default="0,1,2,3", help="of workers of both roles")
    parser.add_argument("--accelerator", choices=ACCELERATORS, default="70b-4xh100")
    parser.add_argument("--slowness", type=float, default=4.0)
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument(
        "--step", type=int, default=2048, help="tokens of a step; WAY@512 has another"
    )
    parser.add_argument("--before", choices=BEFORE, default="mixed", help="what a way gets first")
    parser.add_argument("--load", choices=LOADS, default="plain")
    parser.add_argument("--seconds", type=float, default=30.0, help="of arrivals in a block")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--drain", type=float, default=30.0, help="seconds after the last arrival")
    parser.add_argument(
        "--keep", type=Path, help="file of earlier blocks, to which these are added"
    )
    parser.add_argument("--remark", default="", help="what else is to be said of the run")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    pace = ACCELERATORS[arguments.accelerator].slower(arguments.slowness)
    blocks: list[Block] = []
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "steps").mkdir()
        os.environ.update(pace.variables(folder / "steps"))
        bench = Bench(arguments, pace, folder)
        for way in filter(None, arguments.ways.split(",")):
            made = asyncio.run(bench.way(way))
            blocks = with_earlier(arguments.keep, made) if arguments.keep else blocks + made
    if arguments.keep:
        blocks = with_earlier(arguments.keep, [])
    blocks = [block for block in blocks if block.load == arguments.load]
    good = goodput_table(blocks, bench.alone)
    times = times_table(blocks, bench.alone.tpot_ms)
    print(good, times, sep="\n\n")
    if arguments.output:
        arguments.output.mkdir(parents=True, exist_ok=True)
        what = (
            f"{arguments.accelerator}, slowness {arguments.slowness:g}, {arguments.engines} engines, steps of "
            f"{arguments.step} tokens, load `{arguments.load}`, arrivals during {arguments.seconds:g} s a block."
        )
        text = _NOTES.format(
            load_title="" if arguments.load == "plain" else f": {arguments.load}",
            what=what,
            alone=ALONE_TOKENS,
            share=100 * ATTAINED_MIN,
            goodput=good,
            step_ms=bench.alone.tpot_ms,
            times=times,
            remark=f"\n{arguments.remark}\n" if arguments.remark else "",
        )
        suffix = "" if arguments.load == "plain" else f"_{arguments.load}"
        (arguments.output / f"goodput{suffix}.md").write_text(text)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
