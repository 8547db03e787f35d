"""Makes traces of the form that Mooncake published, from a seed.

    python -m bench.simulation.make_trace conversation --seed 1 --seconds 3600 > bench/simulation/conversation.jsonl
    python -m bench.simulation.make_trace day --seed 1 > day.jsonl

`conversation`: users talk in turns, after one of a few system prompts. Each prompt is the whole conversation so far.
`day`: 24 hours with a ramp in the morning, a burst, and a change from long prompts with short answers to short prompts
with long answers. No two prompts of it share a block.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from headrace_simulator.trace import BLOCK_TOKENS

HOUR_S = 3_600.0
DAY_S = 24 * HOUR_S


@dataclass(frozen=True, slots=True)
class Conversations:
    """The shape of a conversation trace. Lengths are means in tokens, of exponential distributions."""

    starts_per_s: float = 0.05
    system_prompts: int = 4
    system_tokens: tuple[int, int] = (1_024, 4_096)
    turns: float = 4.0
    question_tokens: float = 600.0
    answer_tokens: float = 250.0
    think_s: float = 40.0
    prompt_tokens_max: int = 100_000


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of the day. The rate changes linearly. Lengths are means in tokens."""

    start_h: float
    end_h: float
    start_rate: float
    end_rate: float
    prompt_tokens: float
    answer_tokens: float


LONG_PROMPTS, LONG_ANSWERS = (1_200.0, 60.0), (200.0, 600.0)
DAY = (
    Phase(0, 6, 0.05, 0.05, *LONG_PROMPTS),
    Phase(6, 9, 0.05, 1.2, *LONG_PROMPTS),
    Phase(9, 12, 1.2, 1.2, *LONG_PROMPTS),
    Phase(12, 16, 0.8, 0.8, *LONG_ANSWERS),
    Phase(16, 21, 0.8, 0.05, *LONG_ANSWERS),
    Phase(21, 24, 0.05, 0.05, *LONG_ANSWERS),
)
BURST = Phase(10.5, 10.75, 0.6, 0.6, *LONG_PROMPTS)
"""On top of the phase."""
# Lengths vary by this factor in both directions, most by less.
_SIGMA = 0.5
_LENGTHS = (16, 2_000)


def conversation_entries(
    shape: Conversations, seed: int, seconds: float
) -> Iterator[dict[str, Any]]:
    """The requests in no order."""
    draw = random.Random(f"conversation/{seed}")
    ids: dict[tuple[object, ...], int] = {}
    systems = [draw.randint(*shape.system_tokens) for _ in range(shape.system_prompts)]
    start_s, session = 0.0, 0
    while True:
        start_s += draw.expovariate(shape.starts_per_s)
        if start_s >= seconds:
            return
        session += 1
        system = draw.randrange(len(systems))
        tokens, now_s = systems[system], start_s
        for _ in range(1 + int(draw.expovariate(1 / (shape.turns - 0.5)))):
            tokens += 1 + int(draw.expovariate(1 / shape.question_tokens))
            answer_tokens = 1 + int(draw.expovariate(1 / shape.answer_tokens))
            if now_s >= seconds or tokens > shape.prompt_tokens_max:
                break
            keys = _block_keys(system, systems[system], session, tokens)
            yield _entry(
                now_s, tokens, answer_tokens, [ids.setdefault(key, len(ids)) for key in keys]
            )
            tokens += answer_tokens
            now_s += answer_tokens * 0.03 + draw.expovariate(1 / shape.think_s)


def _block_keys(
    system: int, system_tokens: int, session: int, tokens: int
) -> Iterator[tuple[object, ...]]:
    """Names of the blocks of a prompt. Equal names are equal prefixes up to the end of the block."""
    for place in range(-(-tokens // BLOCK_TOKENS)):
        end = (place + 1) * BLOCK_TOKENS
        if end <= system_tokens:
            yield "system", system, place
        elif end <= tokens:
            yield "whole", session, place
        else:
            yield "part", session, place, tokens


def day_entries(seed: int, scale: float = 1.0) -> Iterator[dict[str, Any]]:
    """The requests of a day in no order. `scale` is a factor on all rates."""
    draw = random.Random(f"day/{seed}")
    for phase in (*DAY, BURST):
        peak = scale * max(phase.start_rate, phase.end_rate)
        length_s = (phase.end_h - phase.start_h) * HOUR_S
        at_s = draw.expovariate(peak)
        while at_s < length_s:
            share = at_s / length_s
            rate = scale * (phase.start_rate + share * (phase.end_rate - phase.start_rate))
            if draw.random() * peak < rate:
                yield _entry(
                    phase.start_h * HOUR_S + at_s,
                    _length(draw, phase.prompt_tokens),
                    _length(draw, phase.answer_tokens),
                    [],
                )
            at_s += draw.expovariate(peak)


def _length(draw: random.Random, mean: float) -> int:
    value = draw.lognormvariate(math.log(mean) - _SIGMA**2 / 2, _SIGMA)
    return int(min(_LENGTHS[1], max(_LENGTHS[0], value)))


def _entry(
    start_s: float, prompt_tokens: int, answer_tokens: int, ids: list[int]
) -> dict[str, Any]:
    return {
        "timestamp": int(start_s * 1e3),
        "input_length": prompt_tokens,
        "output_length": answer_tokens,
        "hash_ids": ids,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("conversation", "day"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=HOUR_S, help="of a conversation trace")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the rates of a day")
    options = parser.parse_args()
    if options.kind == "day":
        entries = day_entries(options.seed, options.scale)
    else:
        entries = conversation_entries(Conversations(), options.seed, options.seconds)
    for entry in sorted(entries, key=lambda one: one["timestamp"]):
        sys.stdout.write(json.dumps(entry, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
