"""Times the fifth turn of conversations with KV in each tier, beside vLLM, which computes it again.

    python -m bench.tiers [--rounds 6] [--no-pool] [--lmcache FOLDER] [--output bench/results]

Our engine has KV memory for two conversations, main memory for four, a disk, and a remote pool on loopback. Beside it
runs an engine of plain vLLM. In a round, our engine answers the first four turns of new conversations. Then the oldest
are on disk, later ones in main memory, and the last one in KV memory. It answers fifth turns, one at a time, and so
does vLLM. Then our engine forgets its own blocks, and answers a turn with those of the pool.

At last, an engine of vLLM with its own offloading computes the same four turns of each conversation, and answers the
same fifth turns. It has as much KV memory and main memory as ours, and files. With --lmcache, so does one with LMCache.
FOLDER has its packages: `pip install --no-deps --target FOLDER lmcache aiofile aiofiles caio nvtx redis
opentelemetry-exporter-prometheus`. All answers are compared. A memcpy of as many bytes as were loaded follows in the
same round.
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
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from bench.support.vllm_child import KEEP_MEMORY, Child, engine, loaded
from bench.support.vllm_ways import CONTEXT_TOKENS, bytes_of_block, engine_arguments
from bench.tiers.peers import TierPeer, lmcache, offloading
from bench.tiers.report import (
    DEVICE,
    DISK,
    HOST,
    NOTES,
    NOWHERE,
    OF_PEERS,
    PEERS,
    PLACES_OF_PEERS,
    REMOTE,
    VLLM_DEVICE,
    VLLM_NOWHERE,
    Results,
    Turn,
    row_of,
    tables,
)
from headrace_common.deadlines import Deadline
from headrace_common.errors import StaleIncarnation
from headrace_engine.interface import DecodeEnded, DecodeTokens, DecodeWork
from headrace_engine.vllm.engine import VllmEngine
from headrace_kv.layout.layout import KvDescriptor, WorkerRef
from headrace_kv.manager.load_times import TierLoad
from headrace_kv.manager.settings import TierSettings
from tests.pool_store import Store
from tests.vllm.pair import GREEDY, engine_config
from tests.waiting import until

BLOCK_TOKENS: Final = 32
FIRST_TOKENS: Final = 700
TURN_TOKENS: Final = 64
ANSWER_TOKENS: Final = 16
TURNS: Final = 4
CONVERSATIONS: Final = 7
MEMORY_BLOCKS: Final = 72
HOST_BLOCKS: Final = 140
# LMCache evicts a fifth of its main memory as soon as 0.8 is full.
LMCACHE_BLOCKS: Final = 210
DISK_BLOCKS: Final = 400
POOL_GIB: Final = 2.0
POOL_TIMEOUT_S: Final = 5.0
TIMEOUT_S: Final = 120.0
_GIB: Final = 1 << 30

# Conversations of a round, by number. 4 and 5 move through KV memory while others are asked.
ASKED: Final = ((6, DEVICE), (3, HOST), (0, DISK))
ASKED_LAST: Final = 1


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


@dataclass(frozen=True, slots=True)
class Engines:
    """All that run. `block_bytes`: of the KV of a block."""

    ours: Ours
    plain: Child
    peers: Sequence[TierPeer]
    block_bytes: int


async def answer_by_vllm(child: Child, prompt: list[int], count: int = ANSWER_TOKENS) -> Turn:
    """The same without our code. `count`: tokens of the answer."""
    token_ids: list[int] = []
    token_s: list[float] = []
    cached = 0
    start_s = time.monotonic()
    async with asyncio.timeout(TIMEOUT_S):
        async for piece in child.generate(prompt, count):
            cached = piece.cached_tokens
            token_s += [time.monotonic() - start_s] * len(piece.token_ids)
            token_ids += piece.token_ids
    return Turn(tuple(token_s), tuple(token_ids), cached)


class Conversation:
    """Grows by the user's random tokens and by the answers."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.text: list[int] = []
        self.prompts: list[list[int]] = []
        self.grow(FIRST_TOKENS - TURN_TOKENS)

    def ask(self) -> list[int]:
        """The prompt of the next turn."""
        self.grow(TURN_TOKENS)
        self.prompts.append(list(self.text))
        return self.prompts[-1]

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
        started = engines(model, arguments.dtype, folder, pool, arguments.lmcache)
        running = await stack.enter_async_context(started)
        for number in range(arguments.rounds + 1):
            into = found if number else Results()
            await measure_round(running, number, into, with_pool=arguments.pool)
            into.memcpy_s.append(memcpy_s(running.block_bytes, len_of_history() // BLOCK_TOKENS))
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
    model: Path, dtype: str, folder: Path, pool: str, packages: Path | None
) -> AsyncIterator[Engines]:
    """Starts ours, then plain vLLM, then the peers with tiers. `packages`: those of LMCache."""
    block_bytes = bytes_of_block(model, dtype, BLOCK_TOKENS)
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
    small = plain | {"num_gpu_blocks_override": MEMORY_BLOCKS}
    try:
        ours.launch()
        async with AsyncExitStack() as stack:
            child = await stack.enter_async_context(engine(plain, folder / "vllm.log", KEEP_MEMORY))
            await ours.attach()
            assert ours.prefix_events is not None
            ours.prefix_events.set_hash_key(1, model.name)
            await loaded(child)
            peers = [
                await stack.enter_async_context(
                    offloading(small, HOST_BLOCKS * block_bytes, folder)
                )
            ]
            if packages is not None:
                started = lmcache(small, LMCACHE_BLOCKS * block_bytes, folder, packages=packages)
                peers.append(await stack.enter_async_context(started))
            await loaded(*(peer.child for peer in peers))
            yield Engines(Ours(ours), child, peers, block_bytes)
    finally:
        await ours.close()


async def measure_round(running: Engines, number: int, found: Results, *, with_pool: bool) -> None:
    """One turn for each row."""
    ours, plain = running.ours, running.plain
    await ours.forget()
    seeds = itertools.count(1_000 * number)
    conversations = [Conversation(next(seeds)) for _ in range(CONVERSATIONS)]
    for conversation in conversations:
        await four_turns(ours, conversation)
    expected: dict[str, tuple[list[int], Turn]] = {}
    for index, row in ASKED:
        prompt = conversations[index].ask()
        turn = await ours.answer(prompt)
        found.turns[row].append(turn)
        for load in turn.loads:
            found.copy_s[load.tier].append(load.seconds / load.block_count)
        computed = await answer_by_vllm(plain, prompt)
        found.compare(turn, computed)
        expected[row] = prompt, computed
    found.turns[VLLM_NOWHERE].append(expected[DISK][1])
    new = Conversation(next(seeds))
    new.grow(len_of_history() - len(new.text))
    await answer_by_vllm(plain, new.text)
    prompt = new.ask()
    cached, computed = await answer_by_vllm(plain, prompt), await ours.answer(prompt)
    expected[NOWHERE] = prompt, cached
    found.turns[VLLM_DEVICE].append(cached)
    found.turns[NOWHERE].append(computed)
    found.compare(computed, cached)
    if with_pool:
        await ours.forget()
        prompt = conversations[ASKED_LAST].ask()
        turn = await ours.answer(prompt)
        found.turns[REMOTE].append(turn)
        found.compare(turn, await answer_by_vllm(plain, prompt))
    for peer in running.peers:
        await measure_peer(peer, conversations, expected, found)


async def measure_peer(
    peer: TierPeer,
    conversations: Sequence[Conversation],
    expected: Mapping[str, tuple[list[int], Turn]],
    found: Results,
) -> None:
    """One turn for each row of a peer. `expected`: prompts by place, and their answers.

    The first four turns have one token: the prompts contain the answers, and a peer stores KV of prompts only.
    """
    for conversation in conversations:
        for prompt in conversation.prompts[:TURNS]:
            await answer_by_vllm(peer.child, prompt, 1)
    for place in PLACES_OF_PEERS:
        prompt, answer = expected[place]
        turn = await answer_by_vllm(peer.child, prompt)
        found.turns[row_of(place, peer.name)].append(turn)
        found.compare(turn, answer)


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


def main() -> None:
    parser = argparse.ArgumentParser(description="See the module's text.")
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--no-pool", dest="pool", action="store_false", help="without a pool")
    parser.add_argument("--lmcache", type=Path, help="folder with LMCache's packages")
    parser.add_argument("--remark", default="", help="what else is to be said of the figures")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    arguments.lmcache = arguments.lmcache and arguments.lmcache.resolve()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = asyncio.run(measure(arguments))
    drawn = tables(found)
    print(drawn)
    print(f"{found.different} answers differ")
    if arguments.output:
        text = NOTES.format(
            what=f"{Path(arguments.model).name}, {arguments.dtype}, 2 cores.",
            options=" --lmcache FOLDER" if arguments.lmcache else "",
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
            compared=found.compared,
            also=" and in the pool" * arguments.pool,
            peers="\n".join(
                OF_PEERS[peer].format(lmcache=LMCACHE_BLOCKS)
                for peer in PEERS
                if found.turns[row_of(NOWHERE, peer)]
            ),
            remark=f"\n{arguments.remark}\n" if arguments.remark else "",
        )
        (arguments.output / "tiers.md").write_text(text)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
