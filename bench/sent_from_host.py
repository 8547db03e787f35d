"""Times hand-overs of prompts that prefill has in KV memory, in main memory only, or not at all.

    python -m bench.sent_from_host [--rounds 8] [--prompt-tokens 1021] [--output bench/results]

Two engines of vLLM on this machine's processors, with one thread each, and Mooncake over TCP on loopback. Decode has
nothing of a prompt. Prefill sends from main memory straight to decode what it has there, and
loads it beside that. All rounds have the three ways with the same prompt, and their answers are compared.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from bench.placement.report import percentile
from bench.support.vllm_ways import bytes_of_block
from headrace_engine.interface import Arrived, DecodeTokens
from headrace_kv.messages import Reservation
from headrace_kv.tiers.tiers import TierSettings
from tests.decoding import decoded
from tests.vllm.pair import GREEDY, TIMEOUT_S, Pair, running_pair
from tests.waiting import until

ANY_VOCABULARY: Final = range(3, 500)
BLOCK_TOKENS: Final = 32
CONTEXT_TOKENS: Final = 2048
ANSWER_TOKENS: Final = 8
# Prompts that take prefill's KV memory from an earlier one.
OTHERS: Final = 3
HOST_PROMPTS: Final = 12
_GIB: Final = 1 << 30

COMPUTED, DEVICE, HOST = "nowhere: computed", "KV memory", "main memory"
ROWS: Final = (DEVICE, HOST, COMPUTED)


@dataclass(frozen=True, slots=True)
class HandedOver:
    """The time to decode's first token, and what prefill had of the prompt. `sent`: first tokens of what it sent."""

    ttft_s: float
    token_ids: tuple[int, ...]
    cached_tokens: int
    sent: tuple[int, ...]


@dataclass(slots=True)
class Results:
    """By row."""

    turns: dict[str, list[HandedOver]] = field(default_factory=lambda: {row: [] for row in ROWS})
    different: int = 0


async def hand_over(pair: Pair, prompt: Sequence[int]) -> HandedOver:
    """One request. Decode has emptied its cache before."""
    await until(pair.decode.reset_prefix_cache)
    work = pair.work(prompt, replace(GREEDY, max_tokens=ANSWER_TOKENS))
    token_ids: list[int] = []
    ttft_s = 0.0
    cached = 0
    sent: set[int] = set()
    start_s = time.monotonic()
    async with asyncio.timeout(TIMEOUT_S):
        async for event in decoded(pair.decode, work):
            if isinstance(event, Reservation):
                outcome, _ = await pair.hand_over(work.token_ids, event)
                pair.decode.transfer_event(Arrived(work.transfer_id))
                cached = outcome.cached_tokens
                sent = {one.start_token for _, one in outcome.layers}
            elif isinstance(event, DecodeTokens):
                ttft_s = ttft_s or time.monotonic() - start_s
                token_ids += event.token_ids
    return HandedOver(ttft_s, tuple(token_ids), cached, tuple(sorted(sent)))


async def measure(options: argparse.Namespace) -> Results:
    """All rounds, after one that is not counted."""
    results = Results()
    model = Path(options.model)
    blocks = -(-options.prompt_tokens // BLOCK_TOKENS)
    block_bytes = bytes_of_block(model, options.dtype, BLOCK_TOKENS)
    shared: dict[str, object] = {
        "model": options.model,
        "dtype": options.dtype,
        "block_size": BLOCK_TOKENS,
        "max_model_len": CONTEXT_TOKENS,
        "max_num_batched_tokens": CONTEXT_TOKENS,
        "num_gpu_blocks_override": 2 * blocks + 8,
    }
    tiers = TierSettings((HOST_PROMPTS * blocks + 0.5) * block_bytes / _GIB)
    async with running_pair(prefill=shared | {"tiers": tiers}, decode=shared) as pair:
        for number in range(options.rounds + 1):
            into = results if number else Results()
            await measure_round(pair, options.prompt_tokens, number, into)
            figures = ", ".join(f"{row} {1e3 * into.turns[row][-1].ttft_s:.0f} ms" for row in ROWS)
            print(f"round {number}: {figures}", file=sys.stderr)
    return results


async def measure_round(pair: Pair, prompt_tokens: int, number: int, results: Results) -> None:
    """A new prompt in each of the three ways. The last two take turns in being the second one."""
    prompts = random.Random(number)

    def new_prompt() -> list[int]:
        return prompts.choices(ANY_VOCABULARY, k=prompt_tokens)

    await until(pair.prefill.reset_prefix_cache)
    prompt = new_prompt()
    answers: set[tuple[int, ...]] = set()
    for row in (COMPUTED, DEVICE, HOST) if number % 2 else (COMPUTED, HOST, DEVICE):
        if row == HOST:
            for _ in range(OTHERS):
                await hand_over(pair, new_prompt())
        turn = await hand_over(pair, prompt)
        results.turns[row].append(turn)
        answers.add(turn.token_ids)
    results.different += len(answers) - 1


def table(results: Results) -> str:
    """A row for each place."""
    titles = (
        *("prefill has the prompt in", "TTFT p50, ms", "p90, ms", "p50 / computed"),
        *("cached tokens p50", "first tokens of what was sent"),
    )
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    computed_s = percentile([one.ttft_s for one in results.turns[COMPUTED]], 0.5)
    for row in ROWS:
        times = [one.ttft_s for one in results.turns[row]]
        sent = sorted({one.sent for one in results.turns[row]})
        cells = (
            row,
            *(f"{1e3 * percentile(times, share):.0f}" for share in (0.5, 0.9)),
            f"{percentile(times, 0.5) / computed_s:.3f}",
            f"{percentile([float(one.cached_tokens) for one in results.turns[row]], 0.5):.0f}",
            "; ".join(", ".join(str(start) for start in starts) for starts in sent),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="See the module's text.")
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=1021)
    parser.add_argument("--remark", default="", help="what else is to be said of the figures")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = asyncio.run(measure(options))
    drawn = table(results)
    print(drawn)
    print(f"{results.different} answers differ")
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "sent_from_host.md").write_text(
            _PAGE.format(
                model=Path(options.model).name,
                dtype=options.dtype,
                table=drawn,
                tokens=options.prompt_tokens,
                block=BLOCK_TOKENS,
                rounds=options.rounds,
                different=results.different,
                remark=f"\n{options.remark}\n" if options.remark else "",
            )
        )


_PAGE: Final = """# Hand-overs that start from prefill's main memory

{model}, {dtype}, 2 cores. Made by
`python -m bench.sent_from_host --model models/{model} --rounds {rounds} --prompt-tokens {tokens}`.

{table}

Prompts have {tokens} tokens, and blocks {block}. Decode has nothing of them. In each of {rounds} rounds, the same new
prompt is computed, sent from KV memory, and sent from main memory after others have evicted it. In each way, prefill
computes at least the last block. {different} answers differ from others of their round.
{remark}"""


if __name__ == "__main__":
    main()
