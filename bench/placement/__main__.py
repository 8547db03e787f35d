"""Compares KV-aware placement with load alone and round robin, on sim workers of real services, in turns.

    python -m bench.placement [--rounds 3] [--first-round 0] [--trace one-prompt] [--conversations 24] [--turns 6]
        [--keep FILE] [--output bench/results]

Conversations over a few system prompts alternate. Every prompt is the whole conversation so far. In the trace
"one-prompt" they are short and start with the same long system prompt, which attracts all of them to one worker. All
ways run the same conversations, with other tokens in every round, so that no way finds blocks of another. The caches
of the workers hold less than all conversations. Uncached tokens are computed by a prefill worker, or on the decode
worker when few are missing there. The prefill queue prefers workers with the prefix in all ways. "KV-aware, 4" has
overlap_weight 4. Hits are prompt tokens that no worker computed. Balance is the busiest decode worker's number of
requests over the mean. The number of a round is its seed. --keep adds the rounds to those of earlier runs in FILE, and
reports on all of them.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bench.placement.deployment import (
    CACHE_TOKENS,
    computed_tokens,
    router_of,
    wait_joined,
    workers_running,
)
from bench.placement.report import Row, render
from bench.placement.trace import Shape, Tally, converse, make_trace
from headrace.inference.v1 import inference_pb2_grpc
from headrace_common.errors import NoDecodeWorker
from headrace_common.rpc.channel import open_channel
from headrace_router.app import Router
from headrace_router.costs import Candidates
from headrace_router.placement import Decision, KvAware, Placement, PlacementRequest

# The weight of a missing token against a held one, where placement uses costs.
WEIGHTS = {
    **{f"KV-aware, {weight}": float(weight) for weight in (1, 2, 4, 8)},
    "load only": 0.0,
}
WAYS = (*WEIGHTS, "round robin")

SHAPES = {
    "conversations": Shape(24, 6, (96, 192), 4, 256),
    "one-prompt": Shape(24, 4, (32, 64), 1, 1_024),
}


class RoundRobin(Placement):
    """Takes the next worker that may take the request, regardless of cache and load. Otherwise as KvAware."""

    def __init__(self, inner: Placement) -> None:
        self._inner = inner
        self._turns = itertools.count()

    def choose(self, request: PlacementRequest, candidates: Candidates) -> Decision:
        refs = [worker.ref for worker in candidates.decode.workers]
        usable = [ref for ref in refs if ref not in request.failed]
        if not usable:
            raise NoDecodeWorker("every decode worker failed")
        chosen = usable[next(self._turns) % len(usable)]
        others = frozenset(refs) - {chosen}
        return self._inner.choose(replace(request, failed=request.failed | others), candidates)


class InTurns(Placement):
    """Delegates to the current `way`."""

    def __init__(self) -> None:
        self.way = WAYS[0]
        self._aware = KvAware(random.Random(1))
        self._round_robin = RoundRobin(self._aware)

    def choose(self, request: PlacementRequest, candidates: Candidates) -> Decision:
        weight = WEIGHTS.get(self.way)
        if weight is None:
            return self._round_robin.choose(request, candidates)
        policy = replace(request.policy, overlap_weight=weight)
        return self._aware.choose(replace(request, policy=policy), candidates)


async def replay(
    router: Router, endpoint: str, placement: InTurns, rounds: range, shape: Shape
) -> dict[str, list[Row]]:
    """Measures every way once per round, starting with another way each time."""
    rows: dict[str, list[Row]] = {way: [] for way in WAYS}
    async with open_channel(endpoint) as channel:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        for number in rounds:
            shift = number % len(WAYS)
            for way in (*WAYS[shift:], *WAYS[:shift]):
                placement.way = way
                trace = make_trace(shape, number, 1_000 * number + WAYS.index(way))
                tally = Tally()
                start_s = time.monotonic()
                async with asyncio.timeout(120), asyncio.TaskGroup() as group:
                    for conversation in trace:
                        group.create_task(converse(stub, conversation, tally))
                tally.took_s = time.monotonic() - start_s
                rows[way].append(_row(tally, await computed_tokens(router, tally)))
    return rows


def _row(tally: Tally, computed: int) -> Row:
    prompt = sum(tokens for tokens, _ in tally.trace_ids.values())
    mean = tally.decode.total() / max(1, len(tally.decode))
    return Row(
        hit_rate=1 - computed / prompt,
        decode_hit_rate=sum(cached for _, cached in tally.trace_ids.values()) / prompt,
        remote_share=len(tally.remote) / len(tally.trace_ids),
        ttft_s=tuple(tally.ttft_s),
        balance=max(tally.decode.values()) / mean,
        took_s=tally.took_s,
    )


async def measure(
    rounds: range, shape: Shape, prefill_count: int, decode_count: int
) -> dict[str, list[Row]]:
    """Starts registry and workers as processes, and the router here."""
    placement = InTurns()
    async with (
        workers_running(prefill_count, decode_count) as registry,
        router_of(registry, placement) as (router, endpoint),
    ):
        await wait_joined(router, prefill_count, decode_count)
        return await replay(router, endpoint, placement, rounds, shape)


def _with_earlier(file: Path, rows: dict[str, list[Row]]) -> dict[str, list[Row]]:
    """The rounds in the file and these. Adds these to the file."""
    known: dict[str, list[dict[str, Any]]] = json.loads(file.read_text()) if file.exists() else {}
    for way, found in rows.items():
        known.setdefault(way, []).extend(map(asdict, found))
    file.write_text(json.dumps(known))
    return {
        way: [Row(**{**row, "ttft_s": tuple(row["ttft_s"])}) for row in found]
        for way, found in known.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--first-round", type=int, default=0, help="its number, which is its seed")
    parser.add_argument("--prefill", type=int, default=2, help="prefill workers")
    parser.add_argument("--decode", type=int, default=4, help="decode workers")
    parser.add_argument(
        "--keep", type=Path, help="JSON of all rounds so far, to which these are added"
    )
    parser.add_argument("--output", type=Path, help="folder for the table")
    parser.add_argument("--trace", choices=SHAPES, default="conversations")
    parser.add_argument("--conversations", type=int, help="instead of the trace's number")
    parser.add_argument(
        "--turns", type=int, help="of a conversation, instead of the trace's number"
    )
    options = parser.parse_args()
    rounds = range(options.first_round, options.first_round + options.rounds)
    shape = SHAPES[options.trace]
    shape = replace(
        shape,
        conversations=options.conversations or shape.conversations,
        turns=options.turns or shape.turns,
    )
    rows: dict[str, list[Row]] = {}
    if rounds:
        rows = asyncio.run(measure(rounds, shape, options.prefill, options.decode))
    if options.keep:
        rows = _with_earlier(options.keep, rows)
    what = (
        f"{shape}. {options.prefill} prefill and {options.decode} decode sim workers with room for {CACHE_TOKENS} "
        f"tokens each, {max(map(len, rows.values()))} rounds"
    )
    text = render(rows, what)
    print(text)
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        name = "placement" if options.trace == "conversations" else f"placement_{options.trace}"
        (options.output / f"{name}.md").write_text(text)
    print(
        f"median round: {statistics.median(row.took_s for found in rows.values() for row in found):.1f} s"
    )


if __name__ == "__main__":
    main()
