"""Load while workers join and leave all the time. `python -m tests.suite.churn --seconds 60` runs it alone.

Every request asks for a remote prefill and may be retried once. Its answer must equal the closed form. The program
prints what the requests saw, and exits with 1 if a request failed, was wrong or hung.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from headrace.inference.v1 import inference_pb2
from headrace_cli.commands.policy import set_policy
from headrace_common.errors import HeadraceError
from tests.suite.deployment import Suite, prompt_of, suite
from tests.suite.fleet import Fleet, Guest

HANG_S: Final = 8.0
_TOKENS: Final = 6
_PROMPT_TOKENS: Final = (40, 130)
_FAILURES_MAX: Final = 20


@dataclass(slots=True)
class Seen:
    """What the requests saw. `attempts` counts requests by their number of attempts, `failures` describes errors."""

    changes: int = 0
    seconds: list[float] = field(default_factory=list)
    attempts: Counter[int] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    @property
    def slowest_s(self) -> float:
        return max(self.seconds, default=0.0)

    @property
    def hangs(self) -> int:
        """Requests that took longer than any planned event."""
        return sum(took_s >= HANG_S for took_s in self.seconds)

    def __str__(self) -> str:
        ordered = sorted(self.seconds)
        middle, late = (
            ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0
            for share in (0.5, 0.99)
        )
        tries = ", ".join(f"{count} in {n}" for n, count in sorted(self.attempts.items()))
        lines = [
            f"{self.changes} times a prefill and a decode worker came, and one of each went",
            f"{len(self.seconds)} requests, by attempts: {tries}; {len(self.failures)} failed, {self.hangs} hung",
            f"p50 {middle * 1e3:.0f} ms, p99 {late * 1e3:.0f} ms, slowest {self.slowest_s * 1e3:.0f} ms",
        ]
        return "\n".join([*lines, *self.failures[:_FAILURES_MAX]])


async def churn(
    it: Suite,
    *,
    enough: Callable[[Seen], bool],
    every_s: float,
    stream_count: int = 8,
    seed: int = 7,
) -> Seen:
    """Adds a worker of each role and removes one, until `enough`. Prefill workers are cut off with their tasks.
    Decode workers drain first. `stream_count` requests run at a time.
    """
    await set_policy(it.deployment.registry, ["retry_budget=1"])
    generator = random.Random(seed)
    prefill, decode = fleets = (
        Fleet("prefill", it.deployment.registry),
        Fleet("decode", it.deployment.registry),
    )
    seen, stop = Seen(), asyncio.Event()
    leaving: list[asyncio.Task[None]] = []
    try:
        for fleet in fleets:
            for _ in range(2):
                await fleet.add()
        threads = own_threads()
        loads = [
            asyncio.create_task(_keep_asking(it, stream, seen, stop))
            for stream in range(stream_count)
        ]
        while not enough(seen) and not any(task.done() for task in loads):
            change_s = time.monotonic()
            await asyncio.gather(prefill.add(), decode.add())
            await _take(prefill, generator.randrange(2)).die()
            leaving.append(asyncio.create_task(_take(decode, 0).leave()))
            seen.changes += 1
            # The exporter of each role has a thread, and gRPC another one while it exports.
            assert len(own_threads()) <= len(threads) + 5, own_threads()
            await asyncio.sleep(max(0.0, change_s + every_s - time.monotonic()))
        stop.set()
        await asyncio.gather(*loads, *leaving)
    finally:
        stop.set()
        await asyncio.gather(*(fleet.close() for fleet in fleets))
    return seen


def _take(fleet: Fleet, number: int) -> Guest:
    return fleet.guests.pop(number)


async def _keep_asking(it: Suite, stream: int, seen: Seen, stop: asyncio.Event) -> None:
    low, high = _PROMPT_TOKENS
    number = 0
    while not stop.is_set():
        number += 1
        prompt = prompt_of(low + number % (high - low), stream * 1_000_000 + number)
        started_s = time.monotonic()
        try:
            outcome = await it.generate(
                prompt, _TOKENS, placement=inference_pb2.PREFILL_PLACEMENT_REMOTE
            )
        except HeadraceError as error:
            seen.failures.append(f"{error.reason}: {error.detail}")
        else:
            seen.attempts[outcome.last.timing.attempts] += 1
            if outcome.token_ids != it.expected(prompt, _TOKENS):
                seen.failures.append(f"a wrong answer, trace {outcome.trace_id}")
        seen.seconds.append(time.monotonic() - started_s)


def own_threads() -> list[str]:
    """Threads of this process without those of the event loop's bounded pool."""
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if not name.startswith("asyncio")]


async def _run(options: argparse.Namespace) -> Seen:
    with tempfile.TemporaryDirectory() as folder:
        async with suite(Path(folder)) as it:
            end_s = time.monotonic() + options.seconds
            return await churn(
                it,
                enough=lambda seen: time.monotonic() >= end_s,
                every_s=options.every,
                stream_count=options.streams,
                seed=options.seed,
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--every", type=float, default=1.0, help="seconds between changes")
    parser.add_argument("--streams", type=int, default=8, help="requests under way at a time")
    parser.add_argument("--seed", type=int, default=7, help="which prefill workers are killed")
    seen = asyncio.run(_run(parser.parse_args()))
    print(seen)
    return 1 if seen.failures or seen.hangs else 0


if __name__ == "__main__":
    sys.exit(main())
