"""Goodput of one prefill and one decode worker beside two vLLM engines that do both, by load and chunk size.

    python -m bench.goodput [--model models/tiny-llama-deep] [--rates 1,2,3] [--steps 256,512,2048,default]
        [--prompts 256,1536] [--answer 48] [--rounds 2] [--seconds 20] [--output bench/results]

Both ways have one core for each of two engines. Requests arrive at random times (Poisson), at each of --rates, whether
or not earlier ones have ended. Lengths of prompts are drawn from the range --prompts. The same requests arrive at the
same times at every way. Ways take turns within a round, and only one computes at a time. A request is good when it
keeps both bounds: --ttft-ms to the first token, and --tpot-ms as the mean between two tokens. One engine without load
sets a bound of 0: five times its time to the first token of the longest prompt, or twice its time between tokens. A
request that has not ended --drain seconds after the last arrival has failed. "default" leaves max_num_batched_tokens to
vLLM.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from bench.goodput.report import ATTAINED_MIN, Answer, Objective, goodput, table
from bench.support.vllm_child import KEEP_MEMORY, Child, engine, loaded
from bench.support.vllm_ways import (
    Ours,
    Tree,
    alternating,
    engine_arguments,
    ours,
    prompt_of,
)
from headrace_common.errors import HeadraceError

OURS: Final = "Headrace, one prefill and one decode worker"
CACHE_TOKENS: Final = 49_152
SEQUENCES: Final = 64
DEFAULT_STEPS: Final = "default"
QUIET_REQUESTS: Final = 6
TTFT_FACTOR: Final = 5.0
TPOT_FACTOR: Final = 2.0
# The smallest ids are those of special tokens.
FIRST_TOKEN: Final = 3

# Yields the time of every token. Arguments: prompt, number of tokens, number of the request.
Ask = Callable[[list[int], int, int], AsyncIterator[int]]


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request, `due_s` after the start of its block."""

    due_s: float
    prompt_tokens: int
    seed: int


def arrivals(rate: float, seconds: float, lengths: tuple[int, int], seed: int) -> list[Arrival]:
    """Poisson arrivals of `rate` requests a second. The result depends on the arguments alone."""
    numbers = random.Random(f"{seed}/{rate}")
    due_s = itertools.accumulate(numbers.expovariate(rate) for _ in itertools.count())
    return [
        Arrival(at_s, numbers.randint(*lengths), numbers.getrandbits(48))
        for at_s in itertools.takewhile(lambda at_s: at_s < seconds, due_s)
    ]


def by_engines(children: list[Child]) -> Ask:
    """Alternates between engines."""

    async def ask(prompt: list[int], count: int, number: int) -> AsyncIterator[int]:
        async for piece in children[number % len(children)].generate(prompt, count):
            for _ in piece.token_ids:
                yield piece.heard_unix_ns

    return ask


def by_us(deployment: Ours) -> Ask:
    """Sends a request to the services."""

    async def ask(prompt: list[int], count: int, number: int) -> AsyncIterator[int]:
        del number
        async for response, now_ns in deployment.generate(prompt, count):
            for _ in response.token_ids:
                yield now_ns

    return ask


class Load:
    """Sends the requests of a block to one way."""

    def __init__(self, token_ids: range, answer_tokens: int, drain_s: float) -> None:
        self._token_ids = token_ids
        self._answer_tokens = answer_tokens
        self._drain_s = drain_s

    async def block(self, ask: Ask, arriving: list[Arrival]) -> list[Answer]:
        """The answers in the order of their arrivals."""
        start_ns = time.time_ns()
        last_s = max((arrival.due_s for arrival in arriving), default=0.0)
        end_ns = start_ns + int(1e9 * (last_s + self._drain_s))
        return await asyncio.gather(
            *(
                self.ask_one(ask, arrival, number, start_ns, end_ns)
                for number, arrival in enumerate(arriving)
            )
        )

    async def ask_one(
        self, ask: Ask, arrival: Arrival, number: int, start_ns: int, end_ns: int
    ) -> Answer:
        """Waits until the request is due, and reads its answer until `end_ns`."""
        due_ns = start_ns + int(1e9 * arrival.due_s)
        await asyncio.sleep(max(0.0, (due_ns - time.time_ns()) / 1e9))
        prompt = prompt_of(arrival.prompt_tokens, arrival.seed, self._token_ids)
        token_ms: list[float] = []
        try:
            async with asyncio.timeout(max(0.0, (end_ns - time.time_ns()) / 1e9)):
                async for now_ns in ask(prompt, self._answer_tokens, number):
                    token_ms.append((now_ns - due_ns) / 1e6)  # noqa: PERF401 - kept on a timeout
        except (HeadraceError, TimeoutError) as error:
            print(f"a request failed: {error!r}", file=sys.stderr)
            return Answer(tuple(token_ms), failed=True)
        return Answer(tuple(token_ms), failed=len(token_ms) < self._answer_tokens)


async def quiet_objective(load: Load, ask: Ask, longest: int) -> Objective:
    """The bounds that follow from requests one after another. The first one warms the engine."""
    alone = [
        (await load.block(ask, [Arrival(0.0, longest, 10**15 + number)]))[0]
        for number in range(QUIET_REQUESTS)
    ][1:]
    return Objective(
        TTFT_FACTOR * statistics.median(answer.ttft_ms for answer in alone),
        TPOT_FACTOR * statistics.median(answer.tpot_ms for answer in alone),
    )


async def start_ways(
    stack: AsyncExitStack, arguments: argparse.Namespace, folder: Path
) -> dict[str, Ask]:
    """Starts all engines on their cores. The first way is the plain engine with the first of --steps."""
    model, dtype = Path(arguments.model), arguments.dtype
    cores = sorted(os.sched_getaffinity(0))[:2]
    asks: dict[str, Ask] = {}
    for steps in arguments.steps.split(","):
        more: dict[str, Any] = {"max_num_seqs": SEQUENCES}
        wanted = engine_arguments(model, dtype, CACHE_TOKENS, **more)
        if steps == DEFAULT_STEPS:
            del wanted["max_num_batched_tokens"]
        else:
            wanted["max_num_batched_tokens"] = int(steps)
        children: list[Child] = []
        for core in (cores[0], cores[-1]):
            log = folder / f"engine-{steps}-{len(children)}.log"
            child = await stack.enter_async_context(engine(wanted, log, KEEP_MEMORY))
            await loaded(child)
            Tree(child.process.pid).pin({core})
            children.append(child)
        asks[f"two vLLM engines, steps of {steps}"] = by_engines(children)
    deployment = await stack.enter_async_context(
        ours(model, dtype, CACHE_TOKENS, folder / "ours", max_num_seqs=str(SEQUENCES))
    )
    deployment.tree("prefill").pin({cores[0]})
    deployment.tree("decode").pin({cores[-1]})
    asks[OURS] = by_us(deployment)
    return asks


async def measure(
    arguments: argparse.Namespace, folder: Path
) -> tuple[Objective, dict[float, dict[str, list[Answer]]]]:
    """Every way in turn, at every rate, round after round."""
    lengths = tuple(map(int, arguments.prompts.split(",")))
    vocabulary = json.loads((Path(arguments.model) / "config.json").read_text())["vocab_size"]
    load = Load(range(FIRST_TOKEN, vocabulary), arguments.answer, arguments.drain)
    rates = [float(rate) for rate in arguments.rates.split(",")]
    async with AsyncExitStack() as stack:
        asks = await start_ways(stack, arguments, folder)
        found: dict[float, dict[str, list[Answer]]] = {
            rate: {way: [] for way in asks} for rate in rates
        }
        objective = await quiet_objective(load, next(iter(asks.values())), lengths[1])
        objective = Objective(
            arguments.ttft_ms or objective.ttft_ms, arguments.tpot_ms or objective.tpot_ms
        )
        for ask in asks.values():
            await quiet_objective(load, ask, lengths[1])
        for number, rate in itertools.product(range(arguments.rounds), rates):
            arriving = arrivals(rate, arguments.seconds, (lengths[0], lengths[1]), number)
            for turn, way in enumerate(alternating(list(asks), number)):
                # Prompts of their own: no engine has another way's blocks, but its own of an earlier round.
                mine = [Arrival(one.due_s, one.prompt_tokens, one.seed + turn) for one in arriving]
                answers = await load.block(asks[way], mine)
                found[rate][way] += answers
                good = sum(answer.keeps(objective) for answer in answers)
                print(f"{number} {rate:g}/s, {way}: {good} of {len(answers)}", file=sys.stderr)
    return objective, found


_NOTES: Final = """# Goodput: one prefill and one decode worker beside two engines that do both

{what} Made by `python -m bench.goodput`.

A request is good when its first token came within {ttft:,.0f} ms, and its later tokens within {tpot:,.1f} ms each, as a
mean.

{table}

Highest measured rate with {share:.0f} % of good requests:

{best}

Both ways have one core for each of two engines. Router, registry and this benchmark use both cores. Requests arrive at
random times, the same at every way. Times count from the moment that a request is due. vLLM's engines are called
through pipes, ours by gRPC at the router.
{remark}"""


def main() -> None:
    parser = argparse.ArgumentParser(description="See the module's text.")
    parser.add_argument("--model", default="models/tiny-llama-deep")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rates", default="1,2,3", help="requests per second")
    parser.add_argument("--steps", default="256,512,2048,default", help="tokens of a step")
    parser.add_argument("--prompts", default="256,1536", help="shortest and longest prompt")
    parser.add_argument("--answer", type=int, default=48, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=20.0, help="of arrivals in a block")
    parser.add_argument("--drain", type=float, default=20.0, help="seconds after the last arrival")
    parser.add_argument("--ttft-ms", type=float, default=0.0)
    parser.add_argument("--tpot-ms", type=float, default=0.0)
    parser.add_argument("--remark", default="", help="what else is to be said of the run")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    with TemporaryDirectory() as folder:
        objective, found = asyncio.run(measure(arguments, Path(folder)))
    drawn = table(found, objective)
    best = "\n".join(f"- {way}: {rate:g}/s" for way, rate in goodput(found, objective).items())
    print(drawn, best, sep="\n\n")
    if arguments.output:
        shortest, longest = arguments.prompts.split(",")
        what = (
            f"{Path(arguments.model).name}, {arguments.dtype}, prompts of {shortest} to {longest} tokens, "
            f"answers of {arguments.answer}, {arguments.rounds} rounds of {arguments.seconds:g} s, 2 cores."
        )
        text = _NOTES.format(
            what=what,
            ttft=objective.ttft_ms,
            tpot=objective.tpot_ms,
            table=drawn,
            share=100 * ATTAINED_MIN,
            best=best,
            remark=f"\n{arguments.remark}\n" if arguments.remark else "",
        )
        (arguments.output / "goodput.md").write_text(text)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
