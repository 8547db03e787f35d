"""Times the tokens of running answers while long prompts arrive: two engines that do both, and one engine for each.

    python -m bench.interference [--every 1,5] [--steps 2048,256] [--rounds 2] [--seconds 20]
        [--before COMMAND --after COMMAND] [--keep FILE] [--output bench/results]

Both ways have equal resources. One is two vLLM engines on one core each, which take answers and prompts in turn.
They prefill in chunks of at most --steps tokens. The other is ours, with the prefill worker on one core and the
decode worker on the other. Four answers run. Every --every seconds a prompt of 1,500 tokens arrives and gets 8 tokens.
All engines run at once, but only those of the current block compute. Ways and intervals alternate. --before and
--after are shell commands around each round. --keep adds the blocks to those in FILE and reports on all of them.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from bench.interference.report import OURS, STALL_MS, Block, gaps_of, table, targets
from bench.support.vllm_child import Child, engine, loaded
from bench.support.vllm_ways import (
    Ours,
    Quiet,
    Tree,
    alternating,
    engine_arguments,
    ours,
    prompt_of,
)
from headrace_common.errors import HeadraceError

ANSWERS: Final = 4
ANSWER_PROMPT_TOKENS: Final = 64
WARM_TOKENS: Final = 8
PROMPT_TOKENS: Final = 1500
PROMPT_ANSWER_TOKENS: Final = 8
CACHE_TOKENS: Final = 8192
# Decode also holds the blocks of prompts that wait for prefill.
OUR_CACHE_TOKENS: Final = 16_384
ANSWER_TOKENS: Final = 900
SETTLE_S: Final = 1.0

# Yields the time of every token. Arguments: prompt, number of tokens, number of the request.
Ask = Callable[[list[int], int, int], AsyncIterator[int]]


def by_engines(children: list[Child]) -> Ask:
    """Alternates between two engines."""

    async def ask(prompt: list[int], count: int, number: int) -> AsyncIterator[int]:
        answer = children[number % len(children)].generate(prompt, count)
        try:
            async for piece in answer:
                for _ in piece.token_ids:
                    yield piece.heard_unix_ns
        finally:
            await answer.aclose()  # type: ignore[attr-defined]

    return ask


def by_us(deployment: Ours) -> Ask:
    """Sends a request to the services."""

    async def ask(prompt: list[int], count: int, number: int) -> AsyncIterator[int]:
        answer = deployment.generate(prompt, count)
        try:
            async for response, now_ns in answer:
                for _ in response.token_ids:
                    yield now_ns
        finally:
            await answer.aclose()  # type: ignore[attr-defined]

    return ask


@dataclass(slots=True)
class Run:
    """One block of the measurement."""

    ask: Ask
    seeds: Iterable[int]
    answers_ns: list[list[int]] = field(default_factory=list)
    first_ns: list[int] = field(default_factory=list)
    answered_ns: list[int] = field(default_factory=list)
    asked: int = 0

    async def block(self, seconds: float, every_s: float) -> Block:
        """Starts the answers, then sends prompts once all answers stream."""
        tasks = [asyncio.create_task(self._answer(number)) for number in range(ANSWERS)]
        try:
            async with asyncio.timeout(30 + ANSWERS * 5):
                while (
                    any(len(times) < WARM_TOKENS for times in self.answers_ns)
                    or not self.answers_ns
                ):
                    await asyncio.sleep(0.05)
                    _raise_failures(tasks)
            start_ns = time.time_ns()
            for number in itertools.count():
                if not every_s or number * every_s >= seconds:
                    break
                await _until(start_ns, number * every_s)
                tasks.append(asyncio.create_task(self._prompt(number)))
                _raise_failures(tasks)
            await _until(start_ns, seconds)
            end_ns = time.time_ns()
            _raise_failures(tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        gaps = [gap for times in self.answers_ns for gap in gaps_of(times, start_ns, end_ns)]
        return Block(
            seconds=(end_ns - start_ns) / 1e9,
            gaps_ms=tuple(gaps),
            tokens=len(gaps),
            asked=self.asked,
            answered=sum(now_ns < end_ns for now_ns in self.answered_ns),
            first_ms=tuple(first / 1e6 for first in self.first_ns),
        )

    async def _answer(self, number: int) -> None:
        times: list[int] = []
        self.answers_ns.append(times)
        prompt = prompt_of(ANSWER_PROMPT_TOKENS, next(iter(self.seeds)))
        async for now_ns in self.ask(prompt, ANSWER_TOKENS, number):
            times.append(now_ns)  # noqa: PERF401 - the block reads them meanwhile
        raise RuntimeError("an answer ended before the block did")

    async def _prompt(self, number: int) -> None:
        self.asked += 1
        start_ns, first = time.time_ns(), True
        prompt = prompt_of(PROMPT_TOKENS, next(iter(self.seeds)))
        try:
            async for now_ns in self.ask(prompt, PROMPT_ANSWER_TOKENS, number):
                if first:
                    self.first_ns.append(now_ns - start_ns)
                    first = False
        except HeadraceError as error:
            # A full deployment refuses. The prompt counts as sent.
            print(f"a prompt was refused: {error.detail}", file=sys.stderr)
        else:
            self.answered_ns.append(time.time_ns())


async def _until(start_ns: int, after_s: float) -> None:
    await asyncio.sleep(max(0.0, after_s - (time.time_ns() - start_ns) / 1e9))


def _raise_failures(tasks: Iterable[asyncio.Task[None]]) -> None:
    for task in tasks:
        if task.done():
            task.result()


async def measure(
    arguments: argparse.Namespace, folder: Path
) -> dict[float, dict[str, list[Block]]]:
    """Starts all engines on their cores, and alternates."""
    model, dtype = Path(arguments.model), arguments.dtype
    cores = sorted(os.sched_getaffinity(0))[:2]
    asks: dict[str, Ask] = {}
    async with AsyncExitStack() as stack:
        deployment = await stack.enter_async_context(
            ours(model, dtype, OUR_CACHE_TOKENS, folder / "ours")
        )
        deployment.tree("prefill").pin({cores[0]})
        deployment.tree("decode").pin({cores[-1]})
        for step_tokens in _numbers(arguments.steps):
            children: list[Child] = []
            for core in (cores[0], cores[-1]):
                log = folder / f"engine-{step_tokens}-{len(children)}.log"
                wanted = engine_arguments(
                    model, dtype, CACHE_TOKENS, max_num_batched_tokens=int(step_tokens)
                )
                child = await stack.enter_async_context(engine(wanted, log))
                Tree(child.process.pid).pin({core})
                children.append(child)
            await loaded(*children)
            asks[engines_name(int(step_tokens))] = by_engines(children)
        asks[OURS] = by_us(deployment)
        return await take_turns(asks, arguments)


async def take_turns(
    asks: dict[str, Ask], arguments: argparse.Namespace
) -> dict[float, dict[str, list[Block]]]:
    """Measures each way once in every round and interval."""
    quiet = Quiet(arguments.before, arguments.after)
    seeds = itertools.count(arguments.first_seed * 100_000)
    intervals = _numbers(arguments.every)
    for ask in asks.values():
        await Run(ask, seeds).block(2.0, 1.0)
    found: dict[float, dict[str, list[Block]]] = {
        every_s: {way: [] for way in asks} for every_s in intervals
    }
    for number in range(arguments.rounds):
        async with quiet.block():
            for every_s in intervals:
                for way in alternating(list(asks), number):
                    await asyncio.sleep(SETTLE_S)
                    block = await Run(asks[way], seeds).block(arguments.seconds, every_s)
                    found[every_s][way].append(block)
                    print(f"{number} every {every_s:g} s, {way}: {block.summary}", file=sys.stderr)
    return found


def engines_name(step_tokens: int) -> str:
    """Two engines that prefill and decode."""
    return f"two vLLM engines, steps of {step_tokens:,} tokens"


def _numbers(text: str) -> list[float]:
    return [float(number) for number in text.split(",")]


_NOTES: Final = """# Running answers while prompts arrive

{what} Made by `python -m bench.interference`.

{table}

{targets}

Gaps are between the tokens of the four running answers, at the client. "Stalled" is the part of their time in gaps of
over {stall:g} ms: p99 misses long gaps that are rarer than 1 in 100. Tokens/s are theirs too. Prompts have {prompt}
tokens and get {answer}. "Answered" counts the prompts with all their tokens at the end of their block. The TTFT covers
the prompts with a token by then. Prompts that a full decode worker refused count as sent. Two engines: vLLM alone,
called through pipes, one core each, with chunked prefill. A step of 2,048 tokens, vLLM's default, takes such a prompt
at once. A step of 256 delays the running answers less, at the price of more steps. Headrace: whole services, called by
gRPC at the router. The prefill worker has one core, the decode worker the other. Router, registry and this benchmark
use both. One prefill worker is one core's worth of prefill, and two engines have two. Prompts that come faster than
one core computes them wait in our queue. On the two engines the running answers wait instead.
{remark}"""


def with_earlier(
    file: Path | None, found: dict[float, dict[str, list[Block]]]
) -> dict[float, dict[str, list[Block]]]:
    """The blocks in the file and these. Adds these to the file."""
    known: dict[str, dict[str, list[dict[str, Any]]]] = {}
    if file and file.exists():
        known = json.loads(file.read_text())
    for every_s, ways in found.items():
        for way, blocks in ways.items():
            kept = known.setdefault(f"{every_s:g}", {}).setdefault(way, [])
            kept.extend(map(asdict, blocks))
    if file:
        file.write_text(json.dumps(known))
    return {
        float(every): {
            way: [
                Block(
                    **{**one, "gaps_ms": tuple(one["gaps_ms"]), "first_ms": tuple(one["first_ms"])}
                )
                for one in blocks
            ]
            for way, blocks in ways.items()
        }
        for every, ways in known.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="See the module's text.")
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--every", default="1,5", help="seconds between prompts; 0 for none")
    parser.add_argument("--steps", default="2048,256", help="tokens of the engines' steps")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=20.0, help="of a block")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--before", default="")
    parser.add_argument("--after", default="")
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--remark", default="", help="what else is to be said of the blocks")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    found: dict[float, dict[str, list[Block]]] = {}
    if arguments.rounds:
        with TemporaryDirectory() as folder:
            found = asyncio.run(measure(arguments, Path(folder)))
    kept = with_earlier(arguments.keep, found)
    drawn, wanted = table(kept), "\n".join(targets(kept))
    print(drawn, wanted, sep="\n\n")
    if arguments.output:
        arguments.output.mkdir(parents=True, exist_ok=True)
        found_blocks = [blocks for ways in kept.values() for blocks in ways.values()]
        seconds = max(sum(block.seconds for block in blocks) for blocks in found_blocks)
        what = (
            f"{Path(arguments.model).name}, {arguments.dtype}, {ANSWERS} running answers, {seconds:.0f} s for each way "
            f"and interval in {max(map(len, found_blocks))} rounds, 2 cores."
        )
        text = _NOTES.format(
            what=what,
            table=drawn,
            targets=wanted,
            stall=STALL_MS,
            prompt=PROMPT_TOKENS,
            answer=PROMPT_ANSWER_TOKENS,
            remark=f"\n{arguments.remark}\n" if arguments.remark else "",
        )
        (arguments.output / "interference.md").write_text(text)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
