"""A load that flips from long prompts to long answers and back, at every way of `bench.goodput`.

    python -m bench.goodput.flip [--rate 2.5] [--phase 15] [--flips 3] [--seed 0] [--output bench/results]

Long prompts have 1,024 to 1,536 tokens and answers of 16. Long answers have 192 tokens and prompts of 128 to 256. A
good request keeps two bounds: 5 times the time to the first token, and 4 times the mean time per later token. Both are
those of the longest prompt on one plain engine without load.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from bench.goodput.__main__ import (
    FIRST_TOKEN,
    Arrival,
    Ask,
    Load,
    arrivals,
    by_us,
    start_ways,
    texts_of,
    without_load,
)
from bench.goodput.report import Answer, Objective, attained, objectives

LONGEST: Final = 1_536
PROMPTS: Final = ((1_024, LONGEST), 16)
ANSWERS: Final = ((128, 256), 192)
SETTLED_S: Final = 5.0
BOUNDS: Final = 1
"""The pair of bounds of `bench.goodput`: 5 and 4 times."""


def flipping(rate: float, phase_s: float, flips: int, seed: int) -> list[Arrival]:
    """Phases of long prompts and of long answers in turn. The result depends on the arguments alone."""
    return [
        Arrival(phase * phase_s + one.due_s, one.prompt_tokens, one.answer_tokens, one.seed)
        for phase in range(flips + 1)
        for one in arrivals(rate, phase_s, *(PROMPTS, ANSWERS)[phase % 2], seed + phase)
    ]


def rows(
    arriving: list[Arrival], answers: list[Answer], objective: Objective, phase_s: float
) -> list[str]:
    """For each phase: the share of good requests in its first 5 s, and later."""
    cells: list[str] = []
    phases = 1 + int(arriving[-1].due_s // phase_s)
    for phase in range(phases):
        parts: tuple[list[Answer], list[Answer]] = ([], [])
        for arrival, answer in zip(arriving, answers, strict=True):
            at_s = arrival.due_s - phase * phase_s
            if 0 <= at_s < phase_s:
                parts[at_s >= SETTLED_S].append(answer)
        cells += [f"{100 * attained(part, objective):.0f} %" if part else "-" for part in parts]
    return cells


async def measure(arguments: argparse.Namespace, folder: Path) -> str:
    """The table of all ways."""
    vocabulary = json.loads((Path(arguments.model) / "config.json").read_text())["vocab_size"]
    load = Load(range(FIRST_TOKEN, vocabulary), drain_s=20.0)
    arriving = flipping(arguments.rate, arguments.phase, arguments.flips, arguments.seed)
    lines: list[str] = []
    async with AsyncExitStack() as stack:
        asks, both = await start_ways(stack, arguments, folder)
        alone = [await without_load(load, ask, LONGEST, 48) for ask in asks.values()]
        await without_load(load, by_us(both, Objective(60_000, 10_000)), LONGEST, 48)
        name, objective = list(objectives(alone[0]).items())[BOUNDS]
        ways: dict[str, Ask] = {
            **asks,
            "Headrace, two workers of both roles": by_us(both, objective),
        }
        for number, (way, ask) in enumerate(ways.items()):
            answers = await load.block(ask, texts_of(arriving, number))
            cells = rows(arriving, answers, objective, arguments.phase)
            lines.append(f"| {' | '.join((way, *cells))} |")
            print(lines[-1], file=sys.stderr)
    titles = ["way"]
    for phase in range(arguments.flips + 1):
        kind = ("long prompts", "long answers")[phase % 2]
        titles += [f"{kind}, first {SETTLED_S:g} s", "later"]
    head = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    return "\n".join([f"Good: {name}.", "", *head, *lines])


_NOTES: Final = """# Goodput while the load flips

{arguments} Made by
`python -m bench.goodput.flip`, which has the loads. Shares of good requests by the time of their arrival in a phase.

{table}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="See the module's text.")
    parser.add_argument("--model", default="models/tiny-llama-deep")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--steps", default="512", help="tokens of a step")
    parser.add_argument("--rate", type=float, default=2.5, help="requests per second")
    parser.add_argument("--phase", type=float, default=15.0, help="seconds")
    parser.add_argument("--flips", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    with TemporaryDirectory() as folder:
        table = asyncio.run(measure(arguments, Path(folder)))
    what = (
        f"{Path(arguments.model).name}, {arguments.dtype}, {arguments.rate:g} requests/s, phases of "
        f"{arguments.phase:g} s, seed {arguments.seed}, 2 cores."
    )
    text = _NOTES.format(arguments=what, table=table)
    print(text)
    if arguments.output:
        arguments.output.mkdir(parents=True, exist_ok=True)
        (arguments.output / "goodput_flip.md").write_text(text)


if __name__ == "__main__":
    main()
