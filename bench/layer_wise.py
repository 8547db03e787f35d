"""Times running answers while KV of prompts arrives: decode waits for all of it, or starts before the last layers.

    python -m bench.layer_wise [--late 0,1,4,8] [--rounds 2] [--seconds 10] [--every 2.5] [--output bench/results]

One prefill and one decode engine run on a core each, connected as the services connect them. Four answers run on
decode. Every --every seconds a prompt of 1,500 tokens comes from prefill. The number of layers that may be missing
when a prompt's request starts changes from block to block (0: it waits for all). Blocks alternate on the same two
engines. Prompts alternate between the two ways to a first token: decode computes it (prompts' TTFT), or prefill
computes it and decode continues.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import psutil

from bench.placement.report import percentile
from bench.support.vllm_ways import Quiet, Tree, alternating, prompt_of
from headrace_common.deadlines import Deadline
from headrace_common.errors import HeadraceError
from headrace_engine.interface import DecodeTokens, DecodeWork, PrefillWork
from headrace_kv.handoff.messages import Reservation
from headrace_kv.receive.observer import LayerOverlap, OverlapSettings, TransferObserver
from tests.vllm.pair import GREEDY, Pair, running_pair
from tests.waiting import until

ANSWERS: Final = 4
ANSWER_PROMPT_TOKENS: Final = 64
WARM_TOKENS: Final = 8
PROMPT_TOKENS: Final = 1500
BLOCK_COUNT: Final = 512
TIMEOUT_S: Final = 60.0
ENGINE_BYTES_MIN: Final = 300_000_000
BY_DECODE, BY_PREFILL = "decode", "prefill"


@dataclass(frozen=True, slots=True)
class Prompt:
    """When a prompt was sent and its tokens came, in seconds of one clock. No token: it failed."""

    first_token: str
    asked_s: float
    token_s: tuple[float, ...]


@dataclass(slots=True)
class Block:
    """One way for some seconds."""

    answers_s: list[list[float]] = field(default_factory=list)
    prompts: list[Prompt] = field(default_factory=list)
    start_s: float = 0.0
    end_s: float = 0.0
    early: int = 0

    def gaps_ms(self) -> Iterator[float]:
        """Gaps between the tokens of the running answers."""
        for times in self.answers_s:
            for before_s, now_s in itertools.pairwise(times):
                if self.start_s <= now_s < self.end_s:
                    yield 1e3 * (now_s - before_s)

    def longest_ms(self) -> Iterator[float]:
        """For each prompt the longest gap while it joins the batch."""
        for prompt in self.prompts:
            if len(prompt.token_s) > 1:
                begin_s, until_s = prompt.asked_s, prompt.token_s[1] + 0.1
                yield max(
                    1e3 * (now_s - before_s)
                    for times in self.answers_s
                    for before_s, now_s in itertools.pairwise(times)
                    if now_s > begin_s and before_s < until_s
                )


class Measured:
    """The pair of engines, and the current overlap_layers."""

    def __init__(self, pair: Pair, every_s: float) -> None:
        self._pair = pair
        self._every_s = every_s
        self._seeds = itertools.count(1)
        self._overlap_layers = 0
        self._block = Block()

    async def block(self, overlap_layers: int, seconds: float) -> Block:
        """Starts the answers, then sends prompts once all answers stream."""
        self._overlap_layers = overlap_layers
        block = self._block = Block()
        tasks = [asyncio.create_task(self._answer()) for _ in range(ANSWERS)]
        try:
            await until(
                lambda: (
                    len(block.answers_s) == ANSWERS
                    and all(len(times) >= WARM_TOKENS for times in block.answers_s)
                ),
                TIMEOUT_S,
            )
            block.start_s = time.monotonic()
            prompts: list[asyncio.Task[None]] = []
            for number in range(max(1, int(seconds / self._every_s))):
                await asyncio.sleep(
                    max(0.0, block.start_s + number * self._every_s - time.monotonic())
                )
                way = (BY_DECODE, BY_PREFILL)[number % 2]
                prompts.append(asyncio.create_task(self._prompt(way)))
            await asyncio.gather(*prompts)
            block.end_s = time.monotonic()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return block

    def _listener(self) -> TransferObserver | None:
        link, pair = self._pair.decode._link, self._pair  # noqa: SLF001 - way by way, not engine by engine
        if not self._overlap_layers or link is None:
            return None
        block, arriving, link_arrived = self._block, link.arriving, link.layers_arrived

        class News:
            """Counts the requests that started before their last layers."""

            layers_arrived = staticmethod(link_arrived)

            @staticmethod
            def arriving(transfer_id: str, deadline: Deadline) -> None:
                block.early += 1
                arriving(transfer_id, deadline)

        return LayerOverlap(
            News(),
            overlap_layers=self._overlap_layers,
            layer_count=pair.decode.descriptor.layout.layer_count,
            rank_count=1,
        )

    async def _answer(self) -> None:
        times: list[float] = []
        self._block.answers_s.append(times)
        sampling = replace(GREEDY, max_tokens=1200)
        prompt = tuple(prompt_of(ANSWER_PROMPT_TOKENS, next(self._seeds)))
        work = DecodeWork(self._pair.new_transfer_id(), prompt, sampling, remote_kv=False)
        async for event in self._pair.decode.decode(work):
            if isinstance(event, DecodeTokens):
                times.extend([time.monotonic()] * len(event.token_ids))
        raise RuntimeError("an answer ended before its block did")

    async def _prompt(self, first_token: str) -> None:
        asked_s = time.monotonic()
        tokens = prompt_of(PROMPT_TOKENS, next(self._seeds))
        token_s: list[float] = []
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await self._hand_over(tuple(tokens), first_token == BY_PREFILL, token_s)
        except HeadraceError as error:
            print(f"a prompt failed: {error.detail}", file=sys.stderr)
        self._block.prompts.append(Prompt(first_token, asked_s, tuple(token_s)))

    async def _hand_over(
        self, prompt: tuple[int, ...], by_prefill: bool, token_s: list[float]
    ) -> None:
        pair = self._pair
        sampling = replace(GREEDY, max_tokens=4)
        work = DecodeWork(
            pair.new_transfer_id(), prompt, sampling, remote_kv=True, awaits_first_token=by_prefill
        )
        sending: list[asyncio.Task[None]] = []

        def pass_first_token(first: DecodeTokens) -> None:
            token_s.append(time.monotonic())
            pair.decode.first_token(work.transfer_id, first.token_ids[0])

        async def send(reservation: Reservation) -> None:
            transfer = pair.receiver.reserve(
                reservation, Deadline.after(TIMEOUT_S), observer=self._listener()
            )
            task = PrefillWork(
                prompt if by_prefill else prompt[:-1],
                pair.target(reservation),
                sampling if by_prefill else None,
            )
            prefill = asyncio.create_task(pair.prefill.prefill(task, pass_first_token))
            try:
                await transfer.wait()
                pair.decode.arrived(work.transfer_id)
            finally:
                await prefill

        try:
            async for event in pair.decode.decode(work):
                if isinstance(event, Reservation):
                    sending.append(asyncio.create_task(send(event)))
                elif isinstance(event, DecodeTokens):
                    token_s.extend([time.monotonic()] * len(event.token_ids))
        finally:
            pair.receiver.cancel(work.transfer_id, "CANCELLED", "the request has ended")
            await asyncio.gather(*sending, return_exceptions=True)


async def measure(arguments: argparse.Namespace) -> dict[int, list[Block]]:
    """Alternates between the ways."""
    ways = [int(number) for number in arguments.late.split(",")]
    cores = sorted(os.sched_getaffinity(0))[:2]
    changes: dict[str, object] = {
        "model": arguments.model,
        "dtype": arguments.dtype,
        "num_gpu_blocks_override": BLOCK_COUNT,
        "max_num_batched_tokens": 2048,
    }
    late = OverlapSettings(layer_count=max(ways) or 1, wait_s=arguments.wait)
    quiet = Quiet(arguments.before, arguments.after)
    found: dict[int, list[Block]] = {way: [] for way in ways}
    async with running_pair(prefill=changes, decode=changes | {"overlap_layers": late}) as pair:
        pin_engines(cores)
        measured = Measured(pair, arguments.every)
        await measured.block(max(ways), 2 * arguments.every)
        for number in range(arguments.rounds):
            async with quiet.block():
                for name in alternating([str(way) for way in ways], number):
                    block = await measured.block(int(name), arguments.seconds)
                    found[int(name)].append(block)
                    gaps = list(block.gaps_ms())
                    print(
                        f"{number} overlap_layers {name}: p99 {percentile(gaps, 0.99):.0f}, max {max(gaps):.0f} ms",
                        file=sys.stderr,
                    )
    return found


def pin_engines(cores: list[int]) -> None:
    """Gives each engine one core. Decode's engine has started first."""
    engines = [
        process
        for process in sorted(psutil.Process().children(), key=lambda one: one.create_time())
        if process.memory_info().rss > ENGINE_BYTES_MIN
    ]
    Tree(engines[0].pid).pin({cores[-1]})
    Tree(engines[-1].pid).pin({cores[0]})


def table(found: dict[int, list[Block]]) -> str:
    """A row for each way."""
    titles = (
        *(
            "overlap_layers",
            "gaps p50, ms",
            "p99, ms",
            "longest, ms",
            "longest at a prompt p50, ms",
        ),
        *("TTFT p50, ms (decode's first token)", "second token p50, ms (prefill's first token)"),
        *("prompts", "started early", "failed"),
    )
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for way, blocks in found.items():
        gaps = [gap for block in blocks for gap in block.gaps_ms()]
        longest = [gap for block in blocks for gap in block.longest_ms()]
        prompts = [prompt for block in blocks for prompt in block.prompts]
        ttft = [
            1e3 * (prompt.token_s[0] - prompt.asked_s)
            for prompt in prompts
            if prompt.first_token == BY_DECODE and prompt.token_s
        ]
        second = [
            1e3 * (prompt.token_s[1] - prompt.token_s[0])
            for prompt in prompts
            if prompt.first_token == BY_PREFILL and len(prompt.token_s) > 1
        ]
        cells = (
            f"{way}" if way else "0 (all must be there)",
            *(f"{percentile(gaps, share):.1f}" for share in (0.5, 0.99)),
            f"{max(gaps):.0f}",
            *(f"{percentile(one, 0.5):.0f}" if one else "-" for one in (longest, ttft, second)),
            f"{len(prompts)}",
            f"{sum(block.early for block in blocks)}",
            f"{sum(len(prompt.token_s) < 2 for prompt in prompts)}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


_NOTES: Final = """# Beginning before the last layers are there

{what} Made by `python -m bench.layer_wise`.

{table}

Gaps are between the tokens of {answers} running answers on the decode engine. Prompts of {prompt} tokens come from the
prefill engine, one every {every:g} s. Each engine has a core, the other processes use both. In a row, a request may
start with that many layers missing. The step that it joins waits for them, and so do all answers in the step.
"Longest at a prompt" is the longest gap of any running answer between a prompt's arrival and its second token, as the
median over the prompts. Blocks of all rows alternated on the same two engines.
{remark}"""


def main() -> None:
    parser = argparse.ArgumentParser(description="See the module's text.")
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--late", default="0,1,4,8", help="layers that may be missing")
    parser.add_argument("--wait", type=float, default=2.0, help="seconds a step waits at most")
    parser.add_argument("--every", type=float, default=2.5, help="seconds between prompts")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=10.0, help="of a block")
    parser.add_argument("--before", default="", help="shell command before each round")
    parser.add_argument("--after", default="", help="shell command after each round")
    parser.add_argument("--remark", default="", help="what else is to be said of the figures")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = asyncio.run(measure(arguments))
    drawn = table(found)
    print(drawn)
    if arguments.output:
        arguments.output.mkdir(parents=True, exist_ok=True)
        seconds = max(sum(one.end_s - one.start_s for one in blocks) for blocks in found.values())
        what = (
            f"{Path(arguments.model).name}, {arguments.dtype}, {seconds:.0f} s for each row in {arguments.rounds} "
            "rounds, 2 cores."
        )
        text = _NOTES.format(
            what=what,
            table=drawn,
            answers=ANSWERS,
            prompt=PROMPT_TOKENS,
            every=arguments.every,
            remark=f"\n{arguments.remark}\n" if arguments.remark else "",
        )
        (arguments.output / "layer_wise.md").write_text(text)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
