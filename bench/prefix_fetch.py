"""Times the turns of conversations where prefill fetches what decode generated, beside prefill that computes it.

    python -m bench.prefix_fetch [--conversations 6] [--turns 10] [--turn-tokens 128] [--answer-tokens 128]
        [--prefill-tokens-per-s 8000,2000] [--output bench/results]

Simulated workers with the KV of an 8-billion model (128 KiB a token), real services, and Mooncake over TCP on loopback.
Two deployments take turns, one conversation at a time. They differ in prefix_fetch_min_tokens only. Prefill computes at
the given speed, so a time is that of a GPU with this speed and of this machine's loopback.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

from headrace.inference.v1 import inference_pb2
from headrace_common.durations import seconds_from_duration
from headrace_common.telemetry import schema
from tests.suite.deployment import PROMPT_VOCABULARY, Suite, suite

MODEL: Final = "sim:layers=32,heads=8,head_bytes=512,context=16384,verify=off"
WAYS: Final = {"computed": 0, "fetched": 64}
"""The setting prefix_fetch_min_tokens of each way."""
REMOTE: Final = inference_pb2.PREFILL_PLACEMENT_REMOTE
_TIMEOUT_S: Final = 120.0

Times = Mapping[tuple[str, int], list[float]]
"""Seconds to the first token, by way and number of the turn."""


async def converse(
    it: Suite, way: str, options: argparse.Namespace, seed: int, times: Times, fetches: list[int]
) -> None:
    """Runs one conversation."""
    generator = random.Random(seed)
    prompt: list[int] = []
    for turn in range(1, options.turns + 1):
        prompt += [generator.randrange(PROMPT_VOCABULARY) for _ in range(options.turn_tokens)]
        outcome = await it.generate(
            prompt, options.answer_tokens, placement=REMOTE, timeout_s=_TIMEOUT_S
        )
        times[way, turn].append(seconds_from_duration(outcome.last.timing.time_to_first_token))
        prompt += outcome.token_ids
        trace = await it.trace(outcome.trace_id)
        fetches += [
            int(span.attributes[schema.ATTRIBUTE_TOKENS])
            for span in trace.spans
            if span.name == schema.SPAN_PREFIX_FETCH
            and schema.ATTRIBUTE_ERROR_REASON not in span.attributes
        ]


async def measure(options: argparse.Namespace, tokens_per_s: float) -> tuple[Times, list[int]]:
    """The times of all conversations, and the tokens of each fetch."""
    times: Times = {(way, turn): [] for way in WAYS for turn in range(1, options.turns + 1)}
    fetches: list[int] = []
    async with AsyncExitStack() as held:
        deployments: dict[str, Suite] = {}
        for way, min_tokens in WAYS.items():
            folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
            settings = (
                ("prefill", "model", f"{MODEL},prefill_s_per_token={1 / tokens_per_s}"),
                ("decode", "model", MODEL),
                ("prefill", "prefix_fetch_min_tokens", str(min_tokens)),
            )
            deployments[way] = await held.enter_async_context(suite(folder, settings=settings))
        for number in range(options.conversations):
            # An even number of conversations gives each way the first place as often.
            ways = list(WAYS) if number % 2 else list(WAYS)[::-1]
            for way in ways:
                await converse(deployments[way], way, options, number, times, fetches)
    return times, fetches


def render(found: Mapping[float, tuple[Times, list[int]]], options: argparse.Namespace) -> str:
    """Markdown: a table of medians by turn."""
    columns = ["prefill, tokens/s", "turn", "computed, ms", "fetched, ms", "fetched / computed"]
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for tokens_per_s, (times, _) in found.items():
        for turn in range(1, options.turns + 1):
            computed, fetched = (statistics.median(times[way, turn]) for way in WAYS)
            cells = [
                f"{tokens_per_s:g}",
                str(turn),
                f"{computed * 1e3:.1f}",
                f"{fetched * 1e3:.1f}",
            ]
            lines.append("| " + " | ".join([*cells, f"{fetched / computed:.2f}"]) + " |")
    counts = ", ".join(
        f"{len(fetches)} fetches of {sum(fetches)} tokens at {tokens_per_s:g} tokens/s"
        for tokens_per_s, (_, fetches) in found.items()
    )
    return "\n".join([*lines, "", f"Median times to first token. {counts}.", ""])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--conversations", type=int, default=6)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--turn-tokens", type=int, default=128)
    parser.add_argument("--answer-tokens", type=int, default=128)
    parser.add_argument("--prefill-tokens-per-s", default="8000,2000", help="several speeds")
    parser.add_argument("--output", type=Path, help="folder for the page")
    options = parser.parse_args(arguments)
    start_s = time.monotonic()
    speeds = [float(text) for text in options.prefill_tokens_per_s.split(",")]
    found = {speed: asyncio.run(measure(options, speed)) for speed in speeds}
    command = (
        f"python -m bench.prefix_fetch --conversations {options.conversations} --turns {options.turns} --turn-tokens "
        f"{options.turn_tokens} --answer-tokens {options.answer_tokens} --prefill-tokens-per-s "
        f"{options.prefill_tokens_per_s}"
    )
    text = f"# Prefix fetch\n\n`{command}`\n\n{render(found, options)}"
    print(text)
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "prefix_fetch.md").write_text(text)
    print(f"took {time.monotonic() - start_s:.0f} s")


if __name__ == "__main__":
    main()
