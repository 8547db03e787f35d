"""Times the turns of conversations where prefill fetches what decode generated, beside prefill that computes it.

    python -m bench.prefix_fetch [--conversations 6] [--turns 10] [--turn-tokens 128] [--answer-tokens 128]
        [--prefill-tokens-per-s 8000,2000] [--output bench/results]
    python -m bench.prefix_fetch --vllm models/SmolLM2-135M-Instruct [--nixl FOLDER] [--turn-tokens 64] ...

Real services, and Mooncake over TCP on loopback. Two deployments answer in turn, one request at a time. They differ in
prefix_fetch_gain only. Without --vllm, the workers are simulated, with the KV of an 8-billion model (128 KiB a
token). Prefill computes at the given speed, so a time is that of a GPU with this speed and of this machine's loopback.
With --vllm, both are vLLM on this machine's processors, with one thread each.

With --nixl, two pairs of vLLM's own engines answer too, without services: NixlConnector with UCX over TCP on loopback.
They differ in the mode `bidirectional_kv_xfer` only. FOLDER has NIXL's package:
`pip install --no-deps --target FOLDER nixl nixl-cu12`.

The ways answer each turn in another order. An even number of conversations has each way as often before another one as
after it. A conversation that is not counted comes first.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from bench.support.nixl_pair import NixlPair, nixl_pair
from bench.support.vllm_child import loaded
from bench.support.vllm_ways import CONTEXT_TOKENS, alternating
from headrace.inference.v1 import inference_pb2
from headrace_common.telemetry import schema
from tests.suite.deployment import PROMPT_VOCABULARY, Suite, suite

MODEL: Final = "sim:layers=32,heads=8,head_bytes=512,context=16384,verify=off"
COMPUTED, FETCHED = "computed", "fetched"
NIXL_COMPUTED, NIXL_FETCHED = "NixlConnector, computed", "NixlConnector, fetched"
FETCHING: Final = (FETCHED, NIXL_FETCHED)
MIN_TOKENS: Final = 64
"""Prefill computes fewer tokens in every way."""
WARM_UP_TURNS: Final = 2
REMOTE: Final = inference_pb2.PREFILL_PLACEMENT_REMOTE
_TIMEOUT_S: Final = 120.0

VLLM_VOCABULARY: Final = range(3, 500)
VLLM_BLOCK_TOKENS: Final = 32
VLLM_BLOCKS: Final = 320
VLLM_DTYPE: Final = "float32"
_MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Case:
    """Workers of one kind. `topology`: options of the deployment. `vocabulary`: tokens of the prompts.

    `nixl`: a folder with NIXL's package, to measure vLLM's own pairs with this `model` too.
    """

    name: str
    topology: Mapping[str, Any]
    settings: tuple[tuple[str, str, str], ...]
    vocabulary: range
    model: Path = Path()
    nixl: Path | None = None


def simulated(tokens_per_s: float) -> Case:
    """Simulated workers, of which prefill computes at this speed."""
    prefill = f"{MODEL},prefill_s_per_token={1 / tokens_per_s}"
    settings = (("prefill", "model", prefill), ("decode", "model", MODEL))
    return Case(f"simulated, {tokens_per_s:g} tokens/s", {}, settings, range(PROMPT_VOCABULARY))


def on_vllm(model: str, nixl: Path | None) -> Case:
    """vLLM on processors."""
    values = {
        "block_size": str(VLLM_BLOCK_TOKENS),
        "num_gpu_blocks_override": str(VLLM_BLOCKS),
        "max_model_len": str(CONTEXT_TOKENS),
        "max_num_batched_tokens": str(CONTEXT_TOKENS),
        # In bfloat16, answers depend on how many tokens a step computes.
        "dtype": VLLM_DTYPE,
    }
    settings = tuple(
        (role, name, value) for role in ("prefill", "decode") for name, value in values.items()
    )
    topology = {"engine": "vllm", "model": model}
    name = f"vLLM, {Path(model).name}"
    return Case(name, topology, settings, VLLM_VOCABULARY, Path(model), nixl)


@dataclass(frozen=True, slots=True)
class Turn:
    """The time from the request to its first token, both at the client. `fetched_bytes`: of prefill, from decode."""

    ttft_s: float
    token_ids: tuple[int, ...]
    fetched_bytes: int


Ask = Callable[[list[int]], Awaitable[Turn]]
"""Answers the next turn of a conversation."""
Way = Callable[[], Ask]
"""Begins a conversation."""
Turns = Mapping[tuple[str, int], list[Turn]]
"""The turns of all conversations, by way and number of the turn."""


def of_ours(it: Suite, answer_tokens: int) -> Ask:
    """A conversation on one of our deployments."""

    async def ask(prompt: list[int]) -> Turn:
        started = asyncio.Event()
        start_s = time.monotonic()
        first = asyncio.create_task(started.wait())
        answer = asyncio.create_task(
            it.generate(
                prompt, answer_tokens, placement=REMOTE, timeout_s=_TIMEOUT_S, started=started
            )
        )
        await asyncio.wait({first, answer}, return_when=asyncio.FIRST_COMPLETED)
        ttft_s = time.monotonic() - start_s
        first.cancel()
        outcome = await answer
        trace = await it.trace(outcome.trace_id)
        fetched = sum(
            int(span.attributes[schema.ATTRIBUTE_PAYLOAD_BYTES])
            for span in trace.spans
            if span.name == schema.SPAN_PREFIX_FETCH
            and schema.ATTRIBUTE_ERROR_REASON not in span.attributes
        )
        return Turn(ttft_s, tuple(outcome.token_ids), fetched)

    return ask


def of_nixl(pair: NixlPair, answer_tokens: int) -> Ask:
    """A conversation on a pair of vLLM's own engines."""
    earlier: Mapping[str, Any] | None = None

    async def ask(prompt: list[int]) -> Turn:
        nonlocal earlier
        with pair.running():
            answer = await pair.answer(prompt, answer_tokens, earlier)
        earlier = answer.params
        return Turn(answer.ttft_s, answer.token_ids, answer.read_bytes)

    return ask


async def measure(options: argparse.Namespace, case: Case) -> Turns:
    """All conversations, after one that is not counted."""
    async with AsyncExitStack() as held:
        ways = await start(held, case, options.answer_tokens)
        found: Turns = {(way, turn): [] for turn in range(1, options.turns + 1) for way in ways}
        for number in range(-1, options.conversations):
            asks = {way: begin() for way, begin in ways.items()}
            prompt: list[int] = []
            generator = random.Random(number + 1)
            for turn in range(1, (WARM_UP_TURNS if number < 0 else options.turns) + 1):
                prompt += generator.choices(case.vocabulary, k=options.turn_tokens)
                answers: set[tuple[int, ...]] = set()
                for way in alternating(list(ways), number + 2 * turn):
                    answered = await asks[way](list(prompt))
                    answers.add(answered.token_ids)
                    if number >= 0:
                        found[way, turn].append(answered)
                    figure = (
                        f"{1e3 * answered.ttft_s:.0f} ms, {answered.fetched_bytes} bytes fetched"
                    )
                    print(f"conversation {number}, turn {turn}, {way}: {figure}", file=sys.stderr)
                assert len(answers) == 1, f"the answers of turn {turn} differ"
                prompt += answers.pop()
    return found


async def start(held: AsyncExitStack, case: Case, answer_tokens: int) -> dict[str, Way]:
    """Starts all engines. The ways are in the order of the table."""

    def folder() -> Path:
        return Path(held.enter_context(tempfile.TemporaryDirectory()))

    ways: dict[str, Way] = {}
    for way, gain in ((COMPUTED, "1"), (FETCHED, "0")):
        settings = (*case.settings, ("prefill", "prefix_fetch_gain", gain))
        deployed = suite(folder(), settings=settings, **case.topology)
        ways[way] = partial(of_ours, await held.enter_async_context(deployed), answer_tokens)
    if case.nixl is not None:
        pairs: dict[str, NixlPair] = {}
        for way, threshold in ((NIXL_COMPUTED, None), (NIXL_FETCHED, MIN_TOKENS)):
            paired = nixl_pair(
                *(case.model, VLLM_DTYPE),
                block_count=VLLM_BLOCKS,
                block_tokens=VLLM_BLOCK_TOKENS,
                min_tokens=threshold,
                packages=case.nixl,
                folder=folder(),
            )
            pairs[way] = await held.enter_async_context(paired)
        for way, pair in pairs.items():
            await loaded(pair.prefill, pair.decode)
            ways[way] = partial(of_nixl, pair, answer_tokens)
        for pair in pairs.values():
            pair.stop()
    return ways


def ratios_of_fetched(turns: Turns, way: str, other: str) -> list[float]:
    """`way` / `other` of the turns where each fetched that can."""
    able = [one for one in (way, other) if one in FETCHING]
    pairs = [
        {way: one, other: base}
        for name, turn in turns
        if name == way
        for one, base in zip(turns[way, turn], turns[other, turn], strict=True)
    ]
    return [
        pair[way].ttft_s / pair[other].ttft_s
        for pair in pairs
        if all(pair[one].fetched_bytes for one in able)
    ]


def render(found: Mapping[str, Turns]) -> str:
    """Markdown: a table of medians by turn."""
    ways = list(dict.fromkeys(way for turns in found.values() for way, _ in turns))
    pairs = [(FETCHED, COMPUTED)]
    if NIXL_FETCHED in ways:
        pairs += [(NIXL_FETCHED, NIXL_COMPUTED), (FETCHED, NIXL_FETCHED)]
    columns = ["workers", "turn"]
    columns += [*(f"{way}, ms" for way in ways), *(f"{one} / {base}" for one, base in pairs)]
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for name, turns in found.items():
        for turn in dict.fromkeys(turn for _, turn in turns):
            medians = {
                way: statistics.median(one.ttft_s for one in turns[way, turn]) for way in ways
            }
            cells = [name, str(turn), *(f"{medians[way] * 1e3:.1f}" for way in ways)]
            cells += [f"{medians[one] / medians[base]:.2f}" for one, base in pairs]
            lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "Median times to first token. The answers were equal.", ""]
    for name, turns in found.items():
        lines += [f"- {name}: {what}" for what in summary(turns, ways, pairs)]
    return "\n".join([*lines, ""])


def summary(turns: Turns, ways: list[str], pairs: list[tuple[str, str]]) -> Iterator[str]:
    """Of all conversations: what was fetched, and the ratios of the turns with fetches."""
    for way in (one for one in FETCHING if one in ways):
        sizes = [
            one.fetched_bytes for name, turn in turns for one in turns[name, turn] if name == way
        ]
        fetched = [size for size in sizes if size]
        yield f"{way}: {len(fetched)} of {len(sizes)} turns fetched {sum(fetched) / _MIB:.1f} MiB."
    for one, base in pairs:
        ratios = ratios_of_fetched(turns, one, base)
        median = f"{statistics.median(ratios):.2f}" if ratios else "-"
        yield f"{one} / {base}: median {median} of the {len(ratios)} turns with fetches."


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--conversations", type=int, default=6)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--turn-tokens", type=int, default=128)
    parser.add_argument("--answer-tokens", type=int, default=128)
    parser.add_argument("--prefill-tokens-per-s", default="8000,2000", help="several speeds")
    parser.add_argument("--vllm", default="", help="model folder: measure vLLM instead")
    parser.add_argument("--nixl", type=Path, help="with --vllm: folder with NIXL's package")
    parser.add_argument("--output", type=Path, help="folder for the page")
    options = parser.parse_args(arguments)
    start_s = time.monotonic()
    if options.vllm:
        cases = [on_vllm(options.vllm, options.nixl and options.nixl.resolve())]
        what = f"--vllm {options.vllm}" + (" --nixl FOLDER" if options.nixl else "")
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
    text = f"# {title}\n\n`{command}`\n\n{render(found)}"
    print(text)
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        page = "prefix_fetch_vllm.md" if options.vllm else "prefix_fetch.md"
        (options.output / page).write_text(text)
    print(f"took {time.monotonic() - start_s:.0f} s")


if __name__ == "__main__":
    main()
