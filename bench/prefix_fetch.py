"""Times the turns of conversations where prefill fetches what decode generated, beside prefill that computes it.

    python -m bench.prefix_fetch [--conversations 6] [--turns 10] [--turn-tokens 128] [--answer-tokens 128]
        [--prefill-tokens-per-s 8000,2000] [--output bench/results]
    python -m bench.prefix_fetch --vllm models/SmolLM2-135M-Instruct [--turn-tokens 64] ...

Real services, and Mooncake over TCP on loopback. Two deployments take turns, one conversation at a time. They differ in
prefix_fetch_min_tokens only. Without --vllm, the workers are simulated, with the KV of an 8-billion model (128 KiB a
token). Prefill computes at the given speed, so a time is that of a GPU with this speed and of this machine's loopback.
With --vllm, both are vLLM on this machine's processors, with one thread each.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from headrace.inference.v1 import inference_pb2
from headrace_common.durations import seconds_from_duration
from headrace_common.telemetry import schema
from tests.suite.deployment import PROMPT_VOCABULARY, Suite, suite

MODEL: Final = "sim:layers=32,heads=8,head_bytes=512,context=16384,verify=off"
WAYS: Final = {"computed": 0, "fetched": 64}
"""The setting prefix_fetch_min_tokens of each way."""
REMOTE: Final = inference_pb2.PREFILL_PLACEMENT_REMOTE
_TIMEOUT_S: Final = 120.0

VLLM_BLOCK_TOKENS: Final = 32


@dataclass(frozen=True, slots=True)
class Case:
    """Workers of one kind. `topology`: options of the deployment. `vocabulary`: tokens of the prompts."""

    name: str
    topology: Mapping[str, Any]
    settings: tuple[tuple[str, str, str], ...]
    vocabulary: range


def simulated(tokens_per_s: float) -> Case:
    """Simulated workers, of which prefill computes at this speed."""
    prefill = f"{MODEL},prefill_s_per_token={1 / tokens_per_s}"
    settings = (("prefill", "model", prefill), ("decode", "model", MODEL))
    return Case(f"simulated, {tokens_per_s:g} tokens/s", {}, settings, range(PROMPT_VOCABULARY))


def on_vllm(model: str) -> Case:
    """vLLM on processors."""
    settings = tuple(
        (role, name, value)
        for role in ("prefill", "decode")
        # In bfloat16, answers depend on how many tokens a step computes.
        for name, value in (("block_size", str(VLLM_BLOCK_TOKENS)), ("dtype", "float32"))
    )
    topology = {"engine": "vllm", "model": model}
    return Case(f"vLLM, {Path(model).name}", topology, settings, range(1_000, 40_000))


Times = Mapping[tuple[str, int], list[float]]
"""Seconds to the first token, by way and number of the turn."""


async def converse(
    it: Suite,
    key: tuple[Case, str],
    options: argparse.Namespace,
    seed: int,
    times: Times,
    fetches: list[int],
) -> list[int]:
    """Runs one conversation. Returns all its tokens."""
    case, way = key
    generator = random.Random(seed)
    prompt: list[int] = []
    for turn in range(1, options.turns + 1):
        prompt += generator.choices(case.vocabulary, k=options.turn_tokens)
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
    return prompt


async def measure(options: argparse.Namespace, case: Case) -> tuple[Times, list[int]]:
    """The times of all conversations, and the tokens of each fetch."""
    times: Times = {(way, turn): [] for way in WAYS for turn in range(1, options.turns + 1)}
    fetches: list[int] = []
    async with AsyncExitStack() as held:
        deployments: dict[str, Suite] = {}
        for way, min_tokens in WAYS.items():
            folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
            settings = (*case.settings, ("prefill", "prefix_fetch_min_tokens", str(min_tokens)))
            deployments[way] = await held.enter_async_context(
                suite(folder, settings=settings, **case.topology)
            )
        for number in range(options.conversations):
            # An even number of conversations gives each way the first place as often.
            ways = list(WAYS) if number % 2 else list(WAYS)[::-1]
            tokens = [
                await converse(deployments[way], (case, way), options, number, times, fetches)
                for way in ways
            ]
            assert tokens[0] == tokens[1], "the answers differ"
    return times, fetches


def ratio_of_pairs(times: Times) -> float:
    """Median of fetched / computed, over the turns after the first of all conversations."""
    ratios = [
        fetched / computed
        for way, turn in times
        if way == "fetched" and turn > 1
        for fetched, computed in zip(times[way, turn], times["computed", turn], strict=True)
    ]
    return statistics.median(ratios)


def render(found: Mapping[str, tuple[Times, list[int]]], options: argparse.Namespace) -> str:
    """Markdown: a table of medians by turn."""
    columns = ["workers", "turn", "computed, ms", "fetched, ms", "fetched / computed"]
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for name, (times, _) in found.items():
        for turn in range(1, options.turns + 1):
            computed, fetched = (statistics.median(times[way, turn]) for way in WAYS)
            cells = [
                name,
                str(turn),
                f"{computed * 1e3:.1f}",
                f"{fetched * 1e3:.1f}",
            ]
            lines.append("| " + " | ".join([*cells, f"{fetched / computed:.2f}"]) + " |")
    counts = ", ".join(
        f"{name}: {len(fetches)} fetches of {sum(fetches)} tokens; the median of fetched / computed over all turns "
        f"after the first is {ratio_of_pairs(times):.2f}"
        for name, (times, fetches) in found.items()
    )
    return "\n".join(
        [*lines, "", f"Median times to first token. The answers were equal. {counts}.", ""]
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--conversations", type=int, default=6)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--turn-tokens", type=int, default=128)
    parser.add_argument("--answer-tokens", type=int, default=128)
    parser.add_argument("--prefill-tokens-per-s", default="8000,2000", help="several speeds")
    parser.add_argument("--vllm", default="", help="model folder: measure vLLM instead")
    parser.add_argument("--output", type=Path, help="folder for the page")
    options = parser.parse_args(arguments)
    start_s = time.monotonic()
    if options.vllm:
        cases, what = [on_vllm(options.vllm)], f"--vllm {options.vllm}"
    else:
        speeds = [float(text) for text in options.prefill_tokens_per_s.split(",")]
        cases = [simulated(speed) for speed in speeds]
        what = f"--prefill-tokens-per-s {options.prefill_tokens_per_s}"
    found = {case.name: asyncio.run(measure(options, case)) for case in cases}
    command = (
        f"python -m bench.prefix_fetch --conversations {options.conversations} --turns {options.turns} --turn-tokens "
        f"{options.turn_tokens} --answer-tokens {options.answer_tokens} {what}"
    )
    title = "Prefix fetch with vLLM" if options.vllm else "Prefix fetch"
    text = f"# {title}\n\n`{command}`\n\n{render(found, options)}"
    print(text)
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        page = "prefix_fetch_vllm.md" if options.vllm else "prefix_fetch.md"
        (options.output / page).write_text(text)
    print(f"took {time.monotonic() - start_s:.0f} s")


if __name__ == "__main__":
    main()
