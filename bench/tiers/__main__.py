"""Times the fifth turn of conversations with KV in each tier, beside vLLM, which computes it again.

    python -m bench.tiers [--rounds 6] [--no-pool] [--output bench/results]

Our engine has KV memory for two conversations, main memory for four, a disk, and a remote pool on loopback. Beside it
runs an engine of plain vLLM. In a round, our engine answers the first four turns of new conversations. Then the oldest
are on disk, later ones in main memory, and the last one in KV memory. It answers fifth turns, one at a time, and so
does vLLM. At last our engine forgets its own blocks, and answers a turn with those of the pool. The answers are
compared. A memcpy of as many bytes as were loaded follows in the same round.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import sys
import tempfile
import time
import warnings
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import numpy as np

from bench.placement.report import percentile
from bench.support.vllm_child import KEEP_MEMORY, Child, engine, loaded
from bench.support.vllm_ways import CONTEXT_TOKENS, engine_arguments
from headrace_common.deadlines import Deadline
from headrace_common.errors import StaleIncarnation
from headrace_engine.interface import DecodeEnded, DecodeTokens, DecodeWork
from headrace_engine.vllm.engine import VllmEngine
from headrace_kv.layout.layout import KvDescriptor, WorkerRef
from headrace_kv.manager.load_times import TierLoad
from headrace_kv.manager.settings import TierSettings
from headrace_kv.prefix.events import Tier
from tests.pool_store import Store
from tests.vllm.pair import GREEDY, engine_config
from tests.waiting import until

BLOCK_TOKENS: Final = 32
FIRST_TOKENS: Final = 700
TURN_TOKENS: Final = 64
ANSWER_TOKENS: Final = 16
LATER_STEPS: Final = 8
TURNS: Final = 4
CONVERSATIONS: Final = 7
MEMORY_BLOCKS: Final = 72
HOST_BLOCKS: Final = 140
DISK_BLOCKS: Final = 400
POOL_GIB: Final = 2.0
POOL_TIMEOUT_S: Final = 5.0
TIMEOUT_S: Final = 120.0
_GIB: Final = 1 << 30

DEVICE, HOST, DISK = "KV memory", "main memory", "disk"
REMOTE, NOWHERE = "the remote pool", "nowhere"
VLLM_DEVICE, VLLM_NOWHERE = "KV memory, plain vLLM", "nowhere, plain vLLM"
ROWS: Final = (DEVICE, HOST, DISK, REMOTE, NOWHERE, VLLM_DEVICE, VLLM_NOWHERE)
# Conversations of a round, by number. 4 and 5 move through KV memory while others are asked.
ASKED: Final = ((6, DEVICE), (3, HOST), (0, DISK))
ASKED_LAST: Final = 1


@dataclass(frozen=True, slots=True)
class Turn:
    """One answered turn, with the times of its tokens since it was asked. `loads`: what the engine loaded for it."""

    token_s: tuple[float, ...]
    token_ids: tuple[int, ...]
    cached_tokens: int = 0
    loads: tuple[TierLoad, ...] = ()

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.token_s[0]

    @property
    def first_gap_s(self) -> float:
        """The step after the prompt's, beside which its blocks are stored."""
        return self.token_s[1] - self.token_s[0]

    @property
    def later_gap_s(self) -> float:
        """The mean of the last steps."""
        return (self.token_s[-1] - self.token_s[-LATER_STEPS - 1]) / LATER_STEPS


@dataclass(slots=True)
class Results:
    """The fifth turns by row. `copy_s` and `memcpy_s`: of one block, by tier."""

    turns: dict[str, list[Turn]] = field(default_factory=lambda: {row: [] for row in ROWS})
    copy_s: dict[Tier, list[float]] = field(default_factory=lambda: {Tier.HOST: [], Tier.DISK: []})
    memcpy_s: list[float] = field(default_factory=list)
    different: int = 0


class MeasuredEngine(VllmEngine):
    """Keeps the loads that its ranks report."""

    loads: list[TierLoad]

    def _tier_loaded(self, rank: int, load: TierLoad) -> None:
        super()._tier_loaded(rank, load)
        self.loads.append(load)


class Ours:
    """Our engine, which answers prompts without a prefill worker."""

    def __init__(self, engine: MeasuredEngine) -> None:
        self._engine = engine
        self._numbers = itertools.count(1)

    async def answer(self, prompt: list[int]) -> Turn:
        """Answers a turn, after all loads of earlier ones were reported."""
        self._engine.loads = []
        work = DecodeWork(
            f"x{next(self._numbers):032d}",
            tuple(prompt),
            replace(GREEDY, max_tokens=ANSWER_TOKENS),
            remote_kv=False,
        )
        token_ids: list[int] = []
        token_s: list[float] = []
        cached = 0
        start_s = time.monotonic()
        async with asyncio.timeout(TIMEOUT_S):
            async for event in self._engine.decode(work):
                if isinstance(event, DecodeTokens):
                    token_s += [time.monotonic() - start_s] * len(event.token_ids)
                    token_ids += event.token_ids
                elif isinstance(event, DecodeEnded):
                    cached = event.cached_tokens
        return Turn(tuple(token_s), tuple(token_ids), cached, tuple(self._engine.loads))

    async def forget(self) -> None:
        """Empties all tiers."""
        await until(self._engine.reset_prefix_cache)


async def answer_by_vllm(child: Child, prompt: list[int]) -> Turn:
    """The same on plain vLLM."""
    token_ids: list[int] = []
    token_s: list[float] = []
    start_s = time.monotonic()
    async with asyncio.timeout(TIMEOUT_S):
        async for piece in child.generate(prompt, ANSWER_TOKENS):
            token_s += [time.monotonic() - start_s] * len(piece.token_ids)
            token_ids += piece.token_ids
    return Turn(tuple(token_s), tuple(token_ids))


class Conversation:
    """Grows by the user's random tokens and by the answers."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.text: list[int] = []
        self.grow(FIRST_TOKENS - TURN_TOKENS)

    def ask(self) -> list[int]:
        """The prompt of the next turn."""
        self.grow(TURN_TOKENS)
        return list(self.text)

    def answered(self, turn: Turn) -> None:
        """The answer belongs to the next prompt."""
        self.text += turn.token_ids

    def grow(self, count: int) -> None:
        """Adds random tokens."""
        self.text += [self._random.randrange(1_000, 40_000) for _ in range(count)]


async def measure(arguments: argparse.Namespace) -> Results:
    """All rounds, after one that is not counted."""
    found = Results()
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = Path(arguments.model)
        pool = await stack.enter_async_context(running_store(folder)) if arguments.pool else ""
        started = engines(model, arguments.dtype, folder, pool)
        ours, child, block_bytes = await stack.enter_async_context(started)
        for number in range(arguments.rounds + 1):
            into = found if number else Results()
            await measure_round(ours, child, number, into, with_pool=arguments.pool)
            into.memcpy_s.append(memcpy_s(block_bytes, len_of_history() // BLOCK_TOKENS))
            last = ", ".join(
                f"{row} {1e3 * turns[-1].ttft_s:.0f} ms"
                for row, turns in into.turns.items()
                if turns
            )
            print(f"round {number}: {last}", file=sys.stderr)
    return found


def len_of_history() -> int:
    """Tokens of a conversation before its fifth turn."""
    return FIRST_TOKENS + (TURNS - 1) * TURN_TOKENS + TURNS * ANSWER_TOKENS


@asynccontextmanager
async def running_store(folder: Path) -> AsyncIterator[str]:
    """A remote pool. Gives its address."""
    store = Store(folder, memory_gib=POOL_GIB)
    try:
        await store.wait()
        yield store.address
    finally:
        store.end()


@asynccontextmanager
async def engines(
    model: Path, dtype: str, folder: Path, pool: str
) -> AsyncIterator[tuple[Ours, Child, int]]:
    """Starts ours, then plain vLLM. Also gives the bytes of a block."""
    block_bytes = bytes_of_block(model, dtype)
    config = engine_config(
        "decode",
        model=str(model),
        dtype=dtype,
        num_gpu_blocks_override=MEMORY_BLOCKS,
        block_size=BLOCK_TOKENS,
        max_model_len=CONTEXT_TOKENS,
        max_num_batched_tokens=2048,
        tiers=TierSettings(
            (HOST_BLOCKS + 0.5) * block_bytes / _GIB,
            (DISK_BLOCKS + 0.5) * block_bytes / _GIB,
            pool_address=pool,
            pool_timeout_s=POOL_TIMEOUT_S,
            publishes=bool(pool),
        ),
    )

    async def descriptors(ref: WorkerRef, deadline: Deadline) -> KvDescriptor:
        raise StaleIncarnation(f"{ref} is not here")

    ours = MeasuredEngine(config, descriptors)
    ours.loads = []
    plain = engine_arguments(
        *(model, dtype, 4 * 1024),
        num_gpu_blocks_override=4 * 1024 // BLOCK_TOKENS,
        block_size=BLOCK_TOKENS,
    )
    try:
        ours.launch()
        async with engine(plain, folder / "vllm.log", KEEP_MEMORY) as child:
            await ours.attach()
            assert ours.prefix_events is not None
            ours.prefix_events.set_hash_key(1, model.name)
            await loaded(child)
            yield Ours(ours), child, block_bytes
    finally:
        await ours.close()


def bytes_of_block(model: Path, dtype: str) -> int:
    """KV bytes of a block, from the model's own configuration."""
    from transformers import AutoConfig

    read = AutoConfig.from_pretrained(str(model))
    head_tokens = 2 * read.num_hidden_layers * read.num_key_value_heads * BLOCK_TOKENS
    head_channels: int = (
        getattr(read, "head_dim", None) or read.hidden_size // read.num_attention_heads
    )
    return int(head_tokens * head_channels * np.dtype(dtype).itemsize)


async def measure_round(
    ours: Ours, child: Child, number: int, found: Results, *, with_pool: bool
) -> None:
    """One turn for each row."""
    await ours.forget()
    seeds = itertools.count(1_000 * number)
    conversations = [Conversation(next(seeds)) for _ in range(CONVERSATIONS)]
    for conversation in conversations:
        await four_turns(ours, conversation)
    for index, row in ASKED:
        prompt = conversations[index].ask()
        turn = await ours.answer(prompt)
        found.turns[row].append(turn)
        for load in turn.loads:
            found.copy_s[load.tier].append(load.seconds / load.block_count)
        computed = await answer_by_vllm(child, prompt)
        found.different += computed.token_ids != turn.token_ids
        if row == DISK:
            found.turns[VLLM_NOWHERE].append(computed)
    new = Conversation(next(seeds))
    new.grow(len_of_history() - len(new.text))
    await answer_by_vllm(child, new.text)
    prompt = new.ask()
    cached, computed = await answer_by_vllm(child, prompt), await ours.answer(prompt)
    found.turns[VLLM_DEVICE].append(cached)
    found.turns[NOWHERE].append(computed)
    found.different += cached.token_ids != computed.token_ids
    if not with_pool:
        return
    await ours.forget()
    prompt = conversations[ASKED_LAST].ask()
    turn = await ours.answer(prompt)
    found.turns[REMOTE].append(turn)
    found.different += (await answer_by_vllm(child, prompt)).token_ids != turn.token_ids


async def four_turns(ours: Ours, conversation: Conversation) -> None:
    """The turns before the measured one."""
    for _ in range(TURNS):
        conversation.answered(await ours.answer(conversation.ask()))


def memcpy_s(block_bytes: int, count: int) -> float:
    """Seconds a block, when one copy moves as many bytes as `count` blocks have."""
    source = np.ones(block_bytes * count, np.uint8)
    target = np.zeros_like(source)
    # Neither is in a cache of the processor.
    np.ones(64 << 20, np.uint8).sum()
    start_s = time.monotonic()
    np.copyto(target, source)
    return (time.monotonic() - start_s) / count


def tables(found: Results) -> str:
    """A row for each place, and one for each tier's copies."""
    computed_s = percentile([one.ttft_s for one in found.turns[VLLM_NOWHERE]], 0.5)
    lines = _head(
        *("KV of the first four turns in", "TTFT p50, ms", "p90, ms"),
        *("p50 / plain vLLM that computes", "cached tokens p50"),
    )
    for row in filter(found.turns.get, ROWS):
        times = [one.ttft_s for one in found.turns[row]]
        cached = percentile([float(one.cached_tokens) for one in found.turns[row]], 0.5)
        cells = (
            row,
            *(f"{1e3 * percentile(times, share):.0f}" for share in (0.5, 0.9)),
            f"{percentile(times, 0.5) / computed_s:.3f}",
            "-" if row in (VLLM_DEVICE, VLLM_NOWHERE) else f"{cached:.0f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    memcpy = percentile(found.memcpy_s, 0.5)
    lines += ["", *_head("copies of a block", "p50, ms", "p50 / memcpy")]
    lines.append(f"| memcpy of as many bytes | {1e3 * memcpy:.3f} | 1.00 |")
    for tier, name in ((Tier.HOST, HOST), (Tier.DISK, DISK)):
        if found.copy_s[tier]:
            copy = percentile(found.copy_s[tier], 0.5)
            lines.append(f"| from {name} | {1e3 * copy:.3f} | {copy / memcpy:.2f} |")
    titles = (
        *("steps after the prompt", "turns", "first, p50, ms", "later, p50, ms"),
        "first / later, p50",
    )
    lines += ["", *_head(*titles)]
    for row, what in ((NOWHERE, "ours, storing the prompt"), (VLLM_NOWHERE, "plain vLLM")):
        # Where the client got all tokens at once, it saw no steps. Such turns are left out.
        turns = [one for one in found.turns[row] if one.later_gap_s]
        columns = (
            [1e3 * one.first_gap_s for one in turns],
            [1e3 * one.later_gap_s for one in turns],
            [one.first_gap_s / one.later_gap_s for one in turns],
        )
        figures = " | ".join(f"{percentile(column, 0.5):.2f}" for column in columns)
        lines.append(f"| {what} | {len(turns)} of {len(found.turns[row])} | {figures} |")
    return "\n".join(lines)


def _head(*titles: str) -> list[str]:
    return [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]


_NOTES: Final = """# Turns of conversations with KV in each tier

{what} Made by `python -m bench.tiers`.

{tables}

The fifth turn of a conversation has {history} tokens of four turns, and {turn} new ones. Blocks have {block} tokens.
Our engine has KV memory for {memory} blocks, main memory for {host}, a file for {disk}, and a pool of {pool:g} GiB on
this host. A turn computes the tokens that are in no whole block of the first four, about {tail}. For the row of the
pool, our engine has emptied its own tiers before. It asks the pool before every turn that it has no KV for. Plain vLLM
has room for all its conversations. Its allocator keeps freed memory, as ours does. Each row has a turn in each of
{rounds} rounds. {different} of {compared} answers differ from those of plain vLLM in the same round. The last table has
the steps of turns without cached KV: our engine stores the prompt's blocks in main memory{also} beside the first one.
{remark}"""


def main() -> None:
    parser = argparse.ArgumentParser(description="See the module's text.")
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--no-pool", dest="pool", action="store_false", help="without a pool")
    parser.add_argument("--remark", default="", help="what else is to be said of the figures")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = asyncio.run(measure(arguments))
    drawn = tables(found)
    print(drawn)
    print(f"{found.different} answers differ")
    if arguments.output:
        text = _NOTES.format(
            what=f"{Path(arguments.model).name}, {arguments.dtype}, 2 cores.",
            tables=drawn,
            history=len_of_history(),
            turn=TURN_TOKENS,
            block=BLOCK_TOKENS,
            memory=MEMORY_BLOCKS,
            host=HOST_BLOCKS,
            disk=DISK_BLOCKS,
            pool=POOL_GIB,
            tail=TURN_TOKENS + len_of_history() % BLOCK_TOKENS,
            rounds=arguments.rounds,
            different=found.different,
            compared=(len(ASKED) + 1 + arguments.pool) * arguments.rounds,
            also=" and in the pool" * arguments.pool,
            remark=f"\n{arguments.remark}\n" if arguments.remark else "",
        )
        (arguments.output / "tiers.md").write_text(text)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
