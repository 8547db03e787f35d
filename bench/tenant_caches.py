"""Compares one prefix cache for all tenants with one for each tenant, on sim workers of real services, in turns.

    python -m bench.tenant_caches [--rounds 3] [--tenants 8] [--requests 1,4,16] [--system-tokens 512]
        [--output bench/results]

All tenants send prompts that start with one system prompt. The routers "shared" and "tenant" use the same workers and
the same placement. They get the same requests at the same times, with other tokens in every round, so that no way finds
blocks of another. Hits are prompt tokens that no worker computed. The number of a round is its seed.
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
from typing import Any

from bench.placement.deployment import (
    BLOCK_TOKENS,
    CACHE_TOKENS,
    computed_tokens,
    router_of,
    wait_joined,
    workers_running,
)
from bench.placement.report import percentile
from bench.placement.trace import STARTS_PER_S, Shape, Tally, converse, make_trace
from headrace.inference.v1 import inference_pb2_grpc
from headrace_common.rpc.channel import open_channel
from headrace_router.app import Router
from headrace_router.placement import KvAware

WAYS = ("shared", "tenant")
PREFILL_COUNT, DECODE_COUNT = 2, 4
TURN_TOKENS = (32, 64)


@dataclass(frozen=True, slots=True)
class Row:
    """One way in one round."""

    hit_rate: float
    ttft_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Site:
    """A router, and a client of it."""

    router: Router
    stub: Any


async def replay(site: Site, shape: Shape, tenants: int, seed: int, tokens_seed: int) -> Row:
    """Sends every request of every tenant, which take turns."""
    tally = Tally()
    async with asyncio.timeout(120), asyncio.TaskGroup() as group:
        for number, conversation in enumerate(make_trace(shape, seed, tokens_seed)):
            metadata = (("x-api-key", f"key-{number % tenants}"),)
            group.create_task(converse(site.stub, conversation, tally, metadata))
    prompt = sum(tokens for tokens, _ in tally.trace_ids.values())
    return Row(1 - await computed_tokens(site.router, tally) / prompt, tuple(tally.ttft_s))


async def measure(
    rounds: int, tenants: int, requests: Sequence[int], system_tokens: int
) -> dict[tuple[int, str], list[Row]]:
    """Rows by number of requests of each tenant and by way."""
    rows: dict[tuple[int, str], list[Row]] = {(n, way): [] for n in requests for way in WAYS}
    async with AsyncExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
        keys = folder / "keys"
        keys.write_text("".join(f"key-{n} tenant-{n}\n" for n in range(tenants)))
        registry = await held.enter_async_context(workers_running(PREFILL_COUNT, DECODE_COUNT))
        sites: dict[str, Site] = {}
        for way in WAYS:
            settings = {"api_keys_file": str(keys), "prefix_cache_scope": way}
            placement = KvAware(random.Random(1))
            router, endpoint = await held.enter_async_context(
                router_of(registry, placement, f"router-{way}", **settings)
            )
            channel = await held.enter_async_context(open_channel(endpoint))
            sites[way] = Site(router, inference_pb2_grpc.InferenceServiceStub(channel))
        for site in sites.values():
            await wait_joined(site.router, PREFILL_COUNT, DECODE_COUNT)
        tokens_seed = 0
        for seed in range(rounds):
            for count in requests:
                shape = Shape(count * tenants, 1, TURN_TOKENS, 1, system_tokens)
                for way in WAYS if seed % 2 == 0 else WAYS[::-1]:
                    tokens_seed += 1
                    row = await replay(sites[way], shape, tenants, seed, tokens_seed)
                    rows[count, way].append(row)
    return rows


def render(rows: Mapping[tuple[int, str], Sequence[Row]], what: str) -> str:
    """Markdown: medians of the rounds, and percentiles over all requests."""
    head = ["requests of a tenant", "prefix cache", "hits", "TTFT p50, ms", "TTFT p99, ms"]
    lines = [what, "", "| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for (count, way), found in rows.items():
        hits = [row.hit_rate for row in found]
        times_s = [time_s for row in found for time_s in row.ttft_s]
        cells = [
            str(count),
            way,
            f"{statistics.median(hits):.1%} ({min(hits):.1%} to {max(hits):.1%})",
            f"{percentile(times_s, 0.5) * 1e3:.0f}",
            f"{percentile(times_s, 0.99) * 1e3:.0f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tenants", type=int, default=8)
    parser.add_argument("--requests", default="1,4,16", help="of each tenant, several numbers")
    parser.add_argument("--system-tokens", type=int, default=512)
    parser.add_argument("--output", type=Path, help="folder for the table")
    options = parser.parse_args()
    requests = [int(text) for text in options.requests.split(",")]
    start_s = time.monotonic()
    rows = asyncio.run(measure(options.rounds, options.tenants, requests, options.system_tokens))
    text = render(
        rows,
        f"One prefix cache for all, and one for each of {options.tenants} tenants, with one system prompt of "
        f"{options.system_tokens} tokens. {STARTS_PER_S:g} requests a second to {PREFILL_COUNT} prefill and "
        f"{DECODE_COUNT} decode sim workers with room for {CACHE_TOKENS} tokens each, in blocks of {BLOCK_TOKENS}, "
        f"{options.rounds} rounds",
    )
    print(text)
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "tenant_caches.md").write_text(text)
    print(f"took {time.monotonic() - start_s:.0f} s")


if __name__ == "__main__":
    main()
