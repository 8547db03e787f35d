"""Turns of agents' conversations on real engines with too little KV memory, beside vLLM.

    python -m bench.agents.engines [--model FOLDER] [--output DIR]

Five conversations of 700 to 1,260 tokens take turns, 8 each. KV memory has room for two of them, and main memory for
all. Beside our prefill and decode worker are an engine of plain vLLM, and one with its own offloading, which has files
too. Each of the four has as much KV memory. At most two engines run at once. A turn reuses the prompt and the answer of
the turn before. Hits are the share of these tokens that no engine computed again.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from bench.support.page_parts import check_page, write_parts
from bench.support.vllm_child import engine, loaded
from bench.support.vllm_ways import (
    BLOCK_TOKENS,
    CONTEXT_TOKENS,
    Ours,
    bytes_of_block,
    engine_arguments,
    ours,
)
from bench.tiers.engines import ANSWER_TOKENS, answer_by_vllm
from bench.tiers.peers import OFFLOADING, offloading
from bench.tiers.report import Turn
from bench.tiers.rounds import Conversation
from headrace_common.telemetry import schema

OURS: Final = "Headrace, prefill and decode"
PLAIN: Final = "plain vLLM"
_CONVERSATIONS: Final = 5
_TURNS: Final = 8
_BLOCK_TOKENS: Final = 32
_MEMORY_BLOCKS: Final = 80
_HOST_BLOCKS: Final = 300
_GIB: Final = 1 << 30
_TRACE_S: Final = 5.0


async def answer_by_ours(it: Ours, prompt: list[int]) -> Turn:
    """Answers a turn. Its cached tokens are those that prefill did not compute."""
    token_ids: list[int] = []
    token_s: list[float] = []
    trace_id, cached = "", 0
    start_s = time.monotonic()
    async for response, _ in it.generate(prompt, ANSWER_TOKENS):
        token_s += [time.monotonic() - start_s] * len(response.token_ids)
        token_ids += response.token_ids
        trace_id = response.trace_id or trace_id
        cached = max(cached, response.usage.decode_cached_tokens)
    trace = await it.operator.trace(trace_id, _TRACE_S)
    for span in trace.spans:
        if span.name == schema.SPAN_PREFILL_COMPUTE:
            cached = max(cached, int(span.attributes[schema.ATTRIBUTE_CACHED_TOKENS]))
    return Turn(tuple(token_s), tuple(token_ids), cached)


async def converse(ask: Callable[[list[int]], Awaitable[Turn]]) -> list[tuple[int, Turn]]:
    """All turns in order, each with its reusable tokens."""
    found: list[tuple[int, Turn]] = []
    conversations = [Conversation(seed) for seed in range(_CONVERSATIONS)]
    for number in range(_TURNS):
        for one in conversations:
            reusable = len(one.text) if number else 0
            turn = await ask(one.ask())
            one.answered(turn)
            found.append((reusable, turn))
    return found


async def measure(model: Path, dtype: str, folder: Path) -> dict[str, list[tuple[int, Turn]]]:
    """Ours, then the others."""
    found: dict[str, list[tuple[int, Turn]]] = {}
    host_bytes = _HOST_BLOCKS * bytes_of_block(model, dtype, _BLOCK_TOKENS)
    async with ours(
        *(model, dtype, _MEMORY_BLOCKS * BLOCK_TOKENS, folder / "ours"),
        block_size=str(_BLOCK_TOKENS),
        max_model_len=str(CONTEXT_TOKENS),
        kv_host_gib=str(host_bytes / _GIB),
    ) as it:
        found[OURS] = await converse(lambda prompt: answer_by_ours(it, prompt))
    arguments = engine_arguments(model, dtype, _MEMORY_BLOCKS * _BLOCK_TOKENS) | {
        "num_gpu_blocks_override": _MEMORY_BLOCKS,
        "block_size": _BLOCK_TOKENS,
    }
    async with AsyncExitStack() as stack:
        plain = await stack.enter_async_context(engine(arguments, folder / "plain.log"))
        peer = await stack.enter_async_context(offloading(arguments, host_bytes, folder))
        await loaded(plain, peer.child)
        found[PLAIN] = await converse(lambda prompt: answer_by_vllm(plain, prompt))
        found[OFFLOADING] = await converse(lambda prompt: answer_by_vllm(peer.child, prompt))
    return found


def table(found: dict[str, list[tuple[int, Turn]]]) -> str:
    """A row for each way, of the turns after the first."""
    later = {name: turns[_CONVERSATIONS:] for name, turns in found.items()}
    plain_s = statistics.median(turn.ttft_s for _, turn in later[PLAIN])
    lines = [_HEAD, "|---" * (_HEAD.count("|") - 1) + "|"]
    for name, turns in later.items():
        reused = sum(min(turn.cached_tokens, reusable) for reusable, turn in turns)
        ttft_s = statistics.median(turn.ttft_s for _, turn in turns)
        pairs = zip(turns, later[PLAIN], strict=True)
        different = sum(one.token_ids != other.token_ids for (_, one), (_, other) in pairs)
        lines.append(
            f"| {name} | {100 * reused / sum(reusable for reusable, _ in turns):.1f} "
            f"| {1e3 * ttft_s:.0f} | {ttft_s / plain_s:.2f} | {different} of {len(turns)} |"
        )
    return "\n".join(lines)


_HEAD: Final = "| server | hits, % | TTFT p50, ms | of plain vLLM's | answers that differ |"


def main() -> None:
    """Measures, prints and writes the table."""
    parser = argparse.ArgumentParser(description="See the module's text.")
    parser.add_argument("--model", type=Path, default=Path("models/SmolLM2-135M-Instruct"))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    page = arguments.output / "agents.md" if arguments.output else None
    if page is not None:
        check_page(page, ["engines"])
    with TemporaryDirectory() as folder:
        text = table(asyncio.run(measure(arguments.model, arguments.dtype, Path(folder))))
    print(text)
    if page is not None:
        write_parts(page, {"engines": text})


if __name__ == "__main__":
    main()
