"""Goodput of two workers of both roles, of one prefill and one decode worker, and of two vLLM engines, by load.

    python -m bench.goodput [--rates 2,3,4,5,6] [--steps 256,512,2048] [--rounds 2] [--first-round 0] [--turns 1]
        [--keep FILE] [--output bench/results]

Each way has one core for each of two engines. Requests arrive at random times (Poisson), at each of --rates, whether
or not earlier ones have ended. Lengths of prompts are drawn from the range --prompts. The same requests arrive at the
same times at every way. Ways take turns within a round, and only one computes at a time. A request is good when it
keeps two bounds: of its time to the first token, and of its mean time per later token. Bounds are multiples of the
times of the longest prompt on one plain engine without load. With --turns above 1, requests are turns of chats: each
prompt begins with the one before, and is longer. A request that has not ended --drain seconds after the
last arrival has failed. The number of a round is its seed. --keep adds the rounds to those in FILE, and reports on all
of them. In --steps, "default" leaves max_num_batched_tokens to vLLM.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from bench.goodput.report import (
    ATTAINED_MIN,
    OF_BOUNDS,
    Answer,
    Objective,
    factors_of,
    goodput_table,
    objectives,
    times_table,
)
from bench.support.vllm_child import Child, engine, loaded
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
BOTH: Final = "Headrace, two workers of both roles"
CACHE_TOKENS: Final = 49_152
SEQUENCES: Final = 64
DEFAULT_STEPS: Final = "default"
QUIET_REQUESTS: Final = 6
# The smallest ids are those of special tokens.
FIRST_TOKEN: Final = 3
TURN_S: Final = 4.0

# Yields the time of every token. Arguments: prompt, number of tokens, number of the request.
Ask = Callable[[list[int], int, int], AsyncIterator[int]]


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request, `due_s` after the start of its block."""

    due_s: float
    prompt_tokens: int
    answer_tokens: int
    seed: int


def arrivals(
    rate: float, seconds: float, lengths: tuple[int, int], answer_tokens: int, seed: int
) -> list[Arrival]:
    """Poisson arrivals of `rate` requests a second. The result depends on the arguments alone."""
    numbers = random.Random(f"{seed}/{rate}")
    due_s = itertools.accumulate(numbers.expovariate(rate) for _ in itertools.count())
    return [
        Arrival(at_s, numbers.randint(*lengths), answer_tokens, numbers.getrandbits(48))
        for at_s in itertools.takewhile(lambda at_s: at_s < seconds, due_s)
    ]


def turns_of(
    rate: float, seconds: float, lengths: tuple[int, int], answer_tokens: int, seed: int, turns: int
) -> list[Arrival]:
    """The turns of chats that begin at random times, `rate` turns a second in all. See `arrivals`.

    Prompts with one seed begin with the same tokens, and those of a chat become longer evenly.
    """
    before_s = TURN_S * (turns - 1)
    shortest, longest = lengths
    chats = arrivals(rate / turns, seconds + before_s, lengths, answer_tokens, seed)
    found = [
        replace(
            chat,
            due_s=chat.due_s - before_s + TURN_S * turn,
            prompt_tokens=shortest + (longest - shortest) * turn // (turns - 1),
        )
        for chat in chats
        for turn in range(turns)
    ]
    return sorted((one for one in found if 0 <= one.due_s < seconds), key=lambda one: one.due_s)


def texts_of(arriving: list[Arrival], way: int) -> list[Arrival]:
    """The same requests with other texts: ways may share engines, and with them their prefix caches."""
    return [replace(arrival, seed=arrival.seed + way) for arrival in arriving]


def by_engines(children: list[Child]) -> Ask:
    """Alternates between engines."""

    async def ask(prompt: list[int], count: int, number: int) -> AsyncIterator[int]:
        async for piece in children[number % len(children)].generate(prompt, count):
            for _ in piece.token_ids:
                yield piece.heard_unix_ns

    return ask


def by_load(children: list[Child]) -> Ask:
    """Chooses the engine with the fewest requests."""
    held = [0] * len(children)

    async def ask(prompt: list[int], count: int, number: int) -> AsyncIterator[int]:
        del number
        chosen = held.index(min(held))
        held[chosen] += 1
        try:
            async for piece in children[chosen].generate(prompt, count):
                for _ in piece.token_ids:
                    yield piece.heard_unix_ns
        finally:
            held[chosen] -= 1

    return ask


def by_us(deployment: Ours, objective: Objective | None = None) -> Ask:
    """Sends a request to the services, with the bounds of `objective`."""
    targets_s = None if objective is None else (1e-3 * objective.ttft_ms, 1e-3 * objective.tpot_ms)

    async def ask(prompt: list[int], count: int, number: int) -> AsyncIterator[int]:
        del number
        async for response, now_ns in deployment.generate(prompt, count, targets_s=targets_s):
            for _ in response.token_ids:
                yield now_ns

    return ask


class Load:
    """Sends the requests of a block to one way."""

    def __init__(self, token_ids: range, drain_s: float) -> None:
        self._token_ids = token_ids
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
                async for now_ns in ask(prompt, arrival.answer_tokens, number):
                    token_ms.append((now_ns - due_ns) / 1e6)  # noqa: PERF401 - kept on a timeout
        except (HeadraceError, TimeoutError) as error:
            print(f"a request failed: {error!r}", file=sys.stderr)
            return Answer(tuple(token_ms), failed=True)
        return Answer(tuple(token_ms), failed=len(token_ms) < arrival.answer_tokens)


async def without_load(load: Load, ask: Ask, longest: int, answer_tokens: int) -> list[Answer]:
    """The longest prompt again and again, one at a time. The first one warms the engine and does not count."""
    return [
        (await load.block(ask, [Arrival(0.0, longest, answer_tokens, time.time_ns())]))[0]
        for _ in range(QUIET_REQUESTS + 1)
    ][1:]


async def start_ways(
    stack: AsyncExitStack, arguments: argparse.Namespace, folder: Path
) -> tuple[dict[str, Ask], Ours]:
    """Starts all engines on their cores. The first way is the plain engine with the first of --steps.

    The last one has both roles, and its behaviour depends on the bounds.
    """
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
            child = await stack.enter_async_context(engine(wanted, log))
            await loaded(child)
            Tree(child.process.pid).pin({core})
            children.append(child)
        asks[f"two vLLM engines, steps of {steps}"] = by_engines(children)
        asks[f"two vLLM engines, steps of {steps}, fewest requests first"] = by_load(children)
    deployment = await stack.enter_async_context(
        ours(model, dtype, CACHE_TOKENS, folder / "ours", max_num_seqs=str(SEQUENCES))
    )
    deployment.tree("prefill").pin({cores[0]})
    deployment.tree("decode").pin({cores[-1]})
    asks[OURS] = by_us(deployment)
    both = await stack.enter_async_context(
        ours(model, dtype, CACHE_TOKENS, folder / "both", both=2, max_num_seqs=str(SEQUENCES))
    )
    first, second = (c for c in both.deployment.children if c.spec.service == "worker")
    Tree(first.process.pid).pin({cores[0]})
    Tree(second.process.pid).pin({cores[-1]})
    return asks, both


async def measure(
    arguments: argparse.Namespace, folder: Path
) -> tuple[list[Answer], dict[float, dict[str, list[Answer]]]]:
    """Requests without load, and every way in turn, at every rate, round after round."""
    shortest, longest = map(int, arguments.prompts.split(","))
    vocabulary = json.loads((Path(arguments.model) / "config.json").read_text())["vocab_size"]
    load, count = Load(range(FIRST_TOKEN, vocabulary), arguments.drain), arguments.answer
    rates = [float(rate) for rate in arguments.rates.split(",")]
    async with AsyncExitStack() as stack:
        asks, both = await start_ways(stack, arguments, folder)
        alone = [await without_load(load, ask, longest, count) for ask in asks.values()]
        await without_load(load, by_us(both, Objective(60_000, 10_000)), longest, count)
        for name, objective in objectives(alone[0]).items():
            asks[f"{BOTH}{OF_BOUNDS}{factors_of(name)}"] = by_us(both, objective)
        found: dict[float, dict[str, list[Answer]]] = {
            rate: {way: [] for way in asks} for rate in rates
        }
        numbers = range(arguments.first_round, arguments.first_round + arguments.rounds)
        for number, rate in itertools.product(numbers, rates):
            wanted = (rate, arguments.seconds, (shortest, longest), count, number)
            arriving = (
                arrivals(*wanted) if arguments.turns == 1 else turns_of(*wanted, arguments.turns)
            )
            for way in alternating(list(asks), number):
                answers = await load.block(asks[way], texts_of(arriving, list(asks).index(way)))
                found[rate][way] += answers
                print(f"{number} {rate:g}/s, {way}: {len(answers)} requests", file=sys.stderr)
    return alone[0], found


def with_earlier(
    file: Path | None, alone: list[Answer], found: dict[float, dict[str, list[Answer]]]
) -> tuple[list[Answer], dict[float, dict[str, list[Answer]]]]:
    """The answers in the file and these. Adds these to the file."""
    known: dict[str, Any] = {"alone": [], "rates": {}}
    if file and file.exists():
        known = json.loads(file.read_text())
    known["alone"] += map(asdict, alone)
    for rate, ways in found.items():
        for way, answers in ways.items():
            known["rates"].setdefault(f"{rate:g}", {}).setdefault(way, []).extend(
                map(asdict, answers)
            )
    if file:
        file.write_text(json.dumps(known))
    return [_answer(one) for one in known["alone"]], {
        float(rate): {way: [_answer(one) for one in answers] for way, answers in ways.items()}
        for rate, ways in known["rates"].items()
    }


def _answer(kept: dict[str, Any]) -> Answer:
    return Answer(tuple(kept["token_ms"]), failed=kept["failed"])


_NOTES: Final = """# Goodput: workers of both roles, two pools, and two vLLM engines

{what} Made by `python -m bench.goodput`.

The share of good requests: those that kept both bounds. Bounds are multiples of the times of the longest prompt on one
plain engine without load. Goodput is the highest rate up to which {share:.0f} % of the requests were good.

{goodput}

Times of the same requests:

{times}

Each way has one core for each of two engines. Router, registry and this benchmark use both cores. Requests arrive at
random times, the same at every way, with other texts at each. Times count from the moment that a request is due. vLLM's
engines are called through pipes, ours by gRPC at the router. Workers of both roles get the bounds with each request, so
they were measured once for each pair of bounds. A request that the router refuses, because its first token would be
late, counts as failed.
{remark}"""


def main() -> None:
    parser = argparse.ArgumentParser(description="See the module's text.")
    parser.add_argument("--model", default="models/tiny-llama-deep")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rates", default="2,3,4,5,6", help="requests per second")
    parser.add_argument("--steps", default="256,512,2048", help="tokens of a step")
    parser.add_argument("--prompts", default="256,1536", help="shortest and longest prompt")
    parser.add_argument("--answer", type=int, default=48, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=20.0, help="of arrivals in a block")
    parser.add_argument("--turns", type=int, default=1, help="of a chat")
    parser.add_argument("--drain", type=float, default=20.0, help="seconds after the last arrival")
    parser.add_argument("--first-round", type=int, default=0, help="its number, which is its seed")
    parser.add_argument(
        "--keep", type=Path, help="JSON of earlier rounds, to which these are added"
    )
    parser.add_argument("--remark", default="", help="what else is to be said of the run")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    alone: list[Answer] = []
    found: dict[float, dict[str, list[Answer]]] = {}
    if arguments.rounds:
        with TemporaryDirectory() as folder:
            alone, found = asyncio.run(measure(arguments, Path(folder)))
    alone, found = with_earlier(arguments.keep, alone, found)
    good, times = goodput_table(found, objectives(alone)), times_table(found)
    print(good, times, sep="\n\n")
    if arguments.output:
        arguments.output.mkdir(parents=True, exist_ok=True)
        shortest, longest = arguments.prompts.split(",")
        what = (
            f"{Path(arguments.model).name}, {arguments.dtype}, prompts of {shortest} to {longest} tokens, "
            f"{'' if arguments.turns == 1 else f'chats of {arguments.turns} turns, one each {TURN_S:g} s, '}"
            f"answers of {arguments.answer}, arrivals during {arguments.seconds:g} s a round, 2 cores."
        )
        text = _NOTES.format(
            what=what,
            share=100 * ATTAINED_MIN,
            goodput=good,
            times=times,
            remark=f"\n{arguments.remark}\n" if arguments.remark else "",
        )
        name = "goodput.md" if arguments.turns == 1 else "goodput_chats.md"
        (arguments.output / name).write_text(text)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
