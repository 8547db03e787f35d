"""Measures goodput at the capacity of a deployment and at three times that, in one run, with sim workers.

    python -m bench.overload [--seconds 15] [--scenario decode|prefill|both] [--answer 16] [--early-refusal]
                             [--output bench/results]

First twice as many clients as slots send requests without a pause: their goodput is the capacity. Then requests arrive
at random times, at that rate (1x) and at three times that rate (3x). A request is good when its whole answer is
correct within its deadline, counted from its first attempt. A refused client retries after the delay that it receives,
as long as its deadline allows. "decode" has few blocks on the decode workers, "prefill" has slow prefill workers.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from headrace_common.errors import DeadlineExceeded, HeadraceError
from tests.suite.deployment import Suite, prompt_of, suite

DEADLINE_S: Final = 6.0
PROMPT_TOKENS: Final = 96
SCENARIOS: Final = {
    "decode": (
        "sim:prefill_s_per_token=0.0002",
        "sim:decode_step_s=0.05,prefill_s_per_token=0.0002",
    ),
    "prefill": (
        "sim:prefill_s_per_token=0.002",
        "sim:decode_step_s=0.02,prefill_s_per_token=0.002",
    ),
}
SLOTS: Final = 8
WORKERS: Final = 2
RETRY_UNKNOWN_S: Final = 0.2


@dataclass(slots=True)
class Phase:
    """One load and its outcome: `offered` requests over `seconds`."""

    name: str
    seconds: float
    offered: int = 0
    good: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    refusals: int = 0
    hints: int = 0
    seconds_each: list[float] = field(default_factory=list)

    @property
    def goodput(self) -> float:
        """Good answers per second."""
        return self.good / self.seconds

    def row(self) -> str:
        ordered = sorted(self.seconds_each) or [0.0]
        p50, p99 = (ordered[int(share * (len(ordered) - 1))] for share in (0.5, 0.99))
        others = ", ".join(f"{count} {end}" for end, count in sorted(self.ends.items())) or "none"
        return (
            f"| {self.name} | {self.offered / self.seconds:.1f} | {self.goodput:.1f} | {p50:.2f} | {p99:.2f} "
            f"| {self.refusals} ({self.hints} with a hint) | {others} |"
        )


class Load:
    """Sends requests and checks the answers."""

    def __init__(self, it: Suite, answer_tokens: int, seed: int) -> None:
        self._it = it
        self._answer_tokens = answer_tokens
        self._random = random.Random(seed)
        self._number = seed

    async def saturated(self, seconds: float) -> Phase:
        """Twice as many clients as slots, without a pause."""
        phase = Phase("all the time", seconds)
        end_s = time.monotonic() + seconds

        async def ask_on() -> None:
            while time.monotonic() < end_s:
                await self._ask(phase, end_s)

        await asyncio.gather(*(ask_on() for _ in range(2 * SLOTS * WORKERS)))
        return phase

    async def open_loop(self, name: str, rate: float, seconds: float) -> Phase:
        """Requests at random times, independent of the outcome of others."""
        phase = Phase(name, seconds)
        end_s = time.monotonic() + seconds
        asked: set[asyncio.Task[None]] = set()
        next_s = time.monotonic()
        while (next_s := next_s + self._random.expovariate(rate)) < end_s:
            await asyncio.sleep(max(0.0, next_s - time.monotonic()))
            asked.add(asyncio.create_task(self._ask(phase, end_s)))
        await asyncio.gather(*asked)
        return phase

    async def _ask(self, phase: Phase, end_s: float) -> None:
        """Good answers count only while the load lasts, because the rest would run on an idle deployment."""
        self._number += 1
        phase.offered += 1
        prompt = prompt_of(PROMPT_TOKENS, self._number)
        started_s = time.monotonic()
        while (left_s := started_s + DEADLINE_S - time.monotonic()) > 0.05:
            try:
                outcome = await self._it.generate(prompt, self._answer_tokens, timeout_s=left_s)
            except HeadraceError as error:
                if error.code.name != "RESOURCE_EXHAUSTED":
                    phase.ends[error.reason] += 1
                    return
                phase.refusals += 1
                phase.hints += error.retry_after_s is not None
                wait_s = error.retry_after_s or RETRY_UNKNOWN_S
                await asyncio.sleep(min(left_s, wait_s * self._random.uniform(1.0, 1.5)))
                continue
            if outcome.token_ids != self._it.expected(prompt, self._answer_tokens):
                phase.ends["WRONG"] += 1
            elif time.monotonic() <= end_s:
                phase.good += 1
                phase.seconds_each.append(time.monotonic() - started_s)
            return
        phase.ends[f"{DeadlineExceeded.reason} among refusals"] += 1


async def measure(
    scenario: str, seconds: float, answer_tokens: int, early_refusal: bool
) -> list[Phase]:
    """The three phases of one scenario."""
    prefill, decode = SCENARIOS[scenario]
    settings = (
        ("prefill", "model", prefill),
        ("decode", "model", decode),
        ("decode", "max_num_seqs", str(SLOTS)),
        ("prefill", "max_num_seqs", "4"),
        ("router", "early_refusal", str(early_refusal)),
        *((service, "max_num_batched_tokens", "128") for service in ("prefill", "decode")),
    )
    with tempfile.TemporaryDirectory() as folder:
        async with suite(
            Path(folder), prefill_count=WORKERS, decode_count=WORKERS, settings=settings
        ) as it:
            load = Load(it, answer_tokens, 1)
            await load.saturated(min(3.0, seconds))
            capacity = await load.saturated(seconds)
            one = await load.open_loop("1x", capacity.goodput, seconds)
            three = await load.open_loop("3x", 3 * capacity.goodput, seconds)
            return [capacity, one, three]


def report(title: str, phases: list[Phase]) -> str:
    """A table and the ratio."""
    peak = max(phases[0].goodput, phases[1].goodput)
    lines = [
        f"### {title}",
        "",
        "| load | offered/s | goodput/s | p50 s | p99 s | refusals | other ends |",
        "|---|---|---|---|---|---|---|",
        *(phase.row() for phase in phases),
        "",
        f"Goodput at 3x is {phases[2].goodput / peak:.2f} of the peak, at 1x {phases[1].goodput / peak:.2f}.",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=15.0, help="of each load")
    parser.add_argument("--scenario", choices=[*SCENARIOS, "both"], default="both")
    parser.add_argument("--answer", type=int, default=16, help="tokens of an answer")
    parser.add_argument("--early-refusal", action="store_true", help="the router's setting")
    parser.add_argument("--output", type=Path, help="folder for overload.md")
    options = parser.parse_args()
    chosen = list(SCENARIOS) if options.scenario == "both" else [options.scenario]
    parts = []
    for scenario in chosen:
        phases = asyncio.run(
            measure(scenario, options.seconds, options.answer, options.early_refusal)
        )
        title = f"{scenario}, early refusal" if options.early_refusal else scenario
        parts.append(report(title, phases))
        print(parts[-1], flush=True)
    if options.output is not None:
        text = "# Goodput under overload\n\n`python -m bench.overload`: what it does is in its docstring.\n\n"
        (options.output / "overload.md").write_text(text + "\n\n".join(parts) + "\n")


if __name__ == "__main__":
    main()
