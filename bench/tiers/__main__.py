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
import sys
import tempfile
import warnings
from contextlib import AsyncExitStack, suppress
from pathlib import Path

from bench.tiers.engines import (
    BLOCK_TOKENS,
    DISK_BLOCKS,
    HOST_BLOCKS,
    LMCACHE_BLOCKS,
    MEMORY_BLOCKS,
    POOL_GIB,
    engines,
    running_store,
)
from bench.tiers.report import NOTES, NOWHERE, OF_PEERS, PEERS, Results, row_of, tables
from bench.tiers.rounds import TURN_TOKENS, len_of_history, measure_round, memcpy_s


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
        arguments.output.mkdir(parents=True, exist_ok=True)
        (arguments.output / "tiers.md").write_text(text)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
