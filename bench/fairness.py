"""Measures what a tenant with 200 requests at once leaves another one, through two routers, with sim workers.

    python -m bench.fairness [--seconds 60] [--rounds 2] [--loops 200] [--slots 64] [--answer 400]
        [--output bench/results]

Tenant A asks for long answers in many loops, half of them through each router. Tenant B has one request at a time. In
the load "first come" both have a key of one tenant, so the routers serve requests in the order of arrival. A rejected
client retries after the delay that it receives. A token counts for the goodput when it arrives during the load and is
correct.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc.aio

from headrace.inference.v1 import inference_pb2_grpc
from headrace_common.errors import DecodeFull, HeadraceError, QueueFull
from headrace_common.rpc.status import error_from_rpc
from tests.suite.deployment import Suite, greedy, prompt_of, suite

PROMPT_TOKENS: Final = 40
B_ANSWER_TOKENS: Final = 20
B_PAUSE_S: Final = 0.1
DEADLINE_S: Final = 60.0
STEP_S: Final = 0.04
WORKERS: Final = 2
RETRY_UNKNOWN_S: Final = 0.2
ALONE, FAIR, FIRST_COME = "B alone", "fair shares", "first come"
# By load, the API keys of A and B.
KEYS: Final = {
    ALONE: ("", "key-of-b-with-its-own-tenant"),
    FAIR: ("key-of-a-with-its-own-tenant", "key-of-b-with-its-own-tenant"),
    FIRST_COME: ("key-of-a-with-one-tenant", "key-of-b-with-one-tenant"),
}
TENANTS: Final = (
    "key-of-a-with-its-own-tenant a\nkey-of-b-with-its-own-tenant b\n"
    "key-of-a-with-one-tenant all\nkey-of-b-with-one-tenant all\n"
)


@dataclass(frozen=True, slots=True)
class Options:
    """The size of the run. See `main`."""

    seconds: float
    rounds: int
    loops: int
    slots: int
    answer_tokens: int

    @property
    def answer_s(self) -> float:
        """How long one answer occupies a slot."""
        return self.answer_tokens * STEP_S


@dataclass(slots=True)
class Phase:
    """One load. `tokens` are the correct ones of both tenants that arrived between `start_s` and `end_s`."""

    name: str
    start_s: float
    end_s: float
    tokens: int = 0
    waits_s: list[float] = field(default_factory=list)
    """Of each request of B: from its first try to its first token."""
    asked: int = 0
    ends: Counter[str] = field(default_factory=Counter)

    @property
    def goodput(self) -> float:
        """Tokens per second."""
        return self.tokens / (self.end_s - self.start_s)

    def arrived(self, count: int) -> None:
        """Counts correct tokens that have just arrived."""
        if self.start_s <= time.monotonic() < self.end_s:
            self.tokens += count

    def wait_s(self, share: float) -> float:
        """A quantile of B's times to first token."""
        return sorted(self.waits_s)[int(share * (len(self.waits_s) - 1))] if self.waits_s else 0.0

    def row(self) -> str:
        others = ", ".join(f"{count} {end}" for end, count in sorted(self.ends.items())) or "none"
        return (
            f"| {self.name} | {self.goodput:.0f} | {self.asked} | {len(self.waits_s) / max(1, self.asked):.0%} "
            f"| {self.wait_s(0.5):.2f} | {self.wait_s(0.99):.2f} | {self.wait_s(1.0):.2f} | {others} |"
        )


class Client:
    """One tenant's requests. Raises AssertionError for a wrong token."""

    def __init__(self, streams: Sequence[Suite], key: str, seeds: Iterator[int]) -> None:
        self._streams = streams
        self._key = key
        self._seeds = seeds

    async def answer(self, phase: Phase, count: int) -> float:
        """Asks until the request is accepted. Returns the time to the first token. Raises HeadraceError."""
        seed = next(self._seeds)
        it, prompt = self._streams[seed % len(self._streams)], prompt_of(PROMPT_TOKENS, seed)
        expected = it.expected(prompt, count)
        began_s = time.monotonic()
        while True:
            found: list[int] = []
            first_s = 0.0
            try:
                async for token_ids in self._stream(it, prompt, count, began_s):
                    first_s = first_s or time.monotonic() - began_s
                    found += token_ids
                    assert tuple(found) == expected[: len(found)]
                    phase.arrived(len(token_ids))
                return first_s
            except (QueueFull, DecodeFull) as error:
                phase.ends["rejections"] += 1
                await asyncio.sleep(error.retry_after_s or RETRY_UNKNOWN_S)

    async def _stream(
        self, it: Suite, prompt: Sequence[int], count: int, began_s: float
    ) -> AsyncIterator[Sequence[int]]:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(it.channel)
        left_s = max(0.05, began_s + DEADLINE_S - time.monotonic())
        call = stub.Generate(
            greedy(prompt, count), metadata=(("x-api-key", self._key),), timeout=left_s
        )
        try:
            async for response in call:
                yield response.token_ids
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error


async def run_load(
    name: str, streams: Sequence[Suite], options: Options, seeds: Iterator[int]
) -> Phase:
    """One load: first A alone until its answers end evenly over time, then both for the measured time."""
    key_of_a, key_of_b = KEYS[name]
    warm_s = 1.5 * options.answer_s if key_of_a else 0.0
    start_s = time.monotonic() + warm_s
    phase = Phase(name, start_s, start_s + options.seconds)
    greedy_client, client = (Client(streams, key, seeds) for key in (key_of_a, key_of_b))

    async def ask_on(number: int) -> None:
        # Answers that begin together would also end together, in one wave after the other.
        await asyncio.sleep(options.answer_s * min(1.0, number / options.slots))
        while True:
            try:
                await greedy_client.answer(phase, options.answer_tokens)
            except HeadraceError as error:
                phase.ends[f"A: {error.reason}"] += 1

    loops = [
        asyncio.create_task(ask_on(number)) for number in range(options.loops if key_of_a else 0)
    ]
    try:
        await asyncio.sleep(warm_s)
        while time.monotonic() < phase.end_s:
            phase.asked += 1
            try:
                phase.waits_s.append(await client.answer(phase, B_ANSWER_TOKENS))
            except HeadraceError as error:
                phase.ends[f"B: {error.reason}"] += 1
            await asyncio.sleep(B_PAUSE_S)
    finally:
        for task in loops:
            if task.done():
                task.result()
            task.cancel()
        await asyncio.gather(*loops, return_exceptions=True)
    for worker in range(WORKERS):
        await streams[0].wait_empty(f"decode-{worker}", 30.0)
    return phase


@asynccontextmanager
async def two_routers(folder: Path, options: Options) -> AsyncIterator[tuple[Suite, Suite]]:
    """A deployment through each of its routers."""
    keys = folder / "keys"
    keys.write_text(TENANTS)
    settings = (
        ("router", "api_keys_file", str(keys)),
        ("prefill", "model", "sim:prefill_s_per_token=0.0001"),
        ("decode", "model", f"sim:decode_step_s={STEP_S},prefill_s_per_token=0.0001"),
        ("decode", "max_num_seqs", str(options.slots // WORKERS)),
        ("decode", "num_gpu_blocks_override", "4096"),
    )
    async with AsyncExitStack() as held:
        it = await held.enter_async_context(
            suite(folder, decode_count=WORKERS, prefill_count=WORKERS, settings=settings)
        )
        child = await it.add("router-1", "router")
        other = await held.enter_async_context(it.through(child))
        await other.wait_joined(WORKERS, WORKERS)
        yield it, other


async def measure(options: Options) -> list[Phase]:
    """B alone, then each round with fair shares and first come."""
    seeds = itertools.count()
    with tempfile.TemporaryDirectory() as folder:
        async with two_routers(Path(folder), options) as streams:
            await run_load(ALONE, streams, Options(0.5, 1, 0, options.slots, 1), seeds)
            names = [ALONE, *(FAIR, FIRST_COME) * options.rounds]
            phases = []
            for name in names:
                phases.append(await run_load(name, streams, options, seeds))
                print(phases[-1].row(), flush=True)
            return phases


def report(options: Options, phases: list[Phase]) -> str:
    """A table and the three goals."""
    by_name = {name: [one for one in phases if one.name == name] for name in KEYS}
    alone_s = by_name[ALONE][0].wait_s(0.5)
    fair = by_name[FAIR]
    asked = sum(one.asked for one in fair)
    answered = sum(len(one.waits_s) for one in fair)
    worst_s = max(one.wait_s(1.0) for one in fair)
    goodput = {
        name: statistics.mean(one.goodput for one in by_name[name]) for name in (FAIR, FIRST_COME)
    }
    size = (
        f"A: {options.loops} loops of {options.answer_tokens} tokens. B: one request at a time, of {B_ANSWER_TOKENS} "
        f"tokens. Two routers, {options.slots} slots on {WORKERS} decode workers, {STEP_S:g} s a token. An answer of A "
        f"occupies a slot for {options.answer_s:g} s."
    )
    goals = (
        f"With fair shares, B got {answered} of {asked} answers. Its worst time to first token is {worst_s:.2f} s. "
        f"Twice its median alone, plus one answer's slot time, is {2 * alone_s + options.answer_s:.2f} s. The goodput "
        f"of both is {goodput[FAIR] / max(1.0, goodput[FIRST_COME]):.2f} of first come."
    )
    lines = [
        size,
        "",
        "| load | tokens/s of both | B asked | B answered | B's TTFT p50 s | p99 s | worst s | other ends |",
        "|---|---|---|---|---|---|---|---|",
        *(phase.row() for phase in phases),
        "",
        goals,
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="of each load")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--loops", type=int, default=200, help="of tenant A")
    parser.add_argument("--slots", type=int, default=64, help="of all decode workers")
    parser.add_argument("--answer", type=int, default=400, help="tokens of A's answers")
    parser.add_argument("--output", type=Path, help="folder for fairness.md")
    chosen = parser.parse_args()
    options = Options(chosen.seconds, chosen.rounds, chosen.loops, chosen.slots, chosen.answer)
    found = report(options, asyncio.run(measure(options)))
    print(found)
    if chosen.output is not None:
        title = "# Fairness between tenants\n\n`python -m bench.fairness`: what it does is in its docstring.\n\n"
        (chosen.output / "fairness.md").write_text(title + found + "\n")


if __name__ == "__main__":
    main()
