"""Compares planning a long prompt's transfer with a memcpy of the same bytes in the same run.

    python -m bench.planner [--tokens N] [--rounds N]

Plans the whole transfer as the senders of all prefill ranks and decode's ledger do: the effective edges, the
reservation's blocks, and the byte runs of every layer. The memcpy uses a buffer larger than the caches, runs between
the plans, and is scaled to the transfer's bytes. Both use one thread.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from headrace_kv.handoff.messages import LayerRange, Reservation
from headrace_kv.layout.layout import KvLayout, RankMemory
from headrace_kv.plan.copy_plan import CopyPlanner
from headrace_kv.plan.shard_map import HEAD_OUTER, TOKENS_OUTER, Dimension, place_regions
from headrace_kv.receive.ledger import Ledger
from headrace_kv.send.layer_write import WritePlan

_LAYERS = 61
_MEMCPY_BYTES = 256 * 1024 * 1024
_TARGET_PERCENT = 2.0


@dataclass(frozen=True, slots=True)
class Case:
    """One transfer. `fragments`: runs of adjacent blocks in the block list of either side."""

    name: str
    prefill: KvLayout
    decode: KvLayout
    orders: tuple[tuple[Dimension, ...], tuple[Dimension, ...]]
    fragments: int


@dataclass(frozen=True, slots=True)
class Figures:
    """Seconds of planning and of copying, with the planned bytes and runs."""

    case: Case
    plan_s: float
    memcpy_s: float
    payload_bytes: int
    run_count: int

    @property
    def percent(self) -> float:
        """Planning as a share of the memcpy."""
        return 100.0 * self.plan_s / self.memcpy_s


def make_cases(tokens: int) -> list[Case]:
    """MLA and GQA from 8 ranks to 4, with blocks in one run, in some runs, and all scattered."""
    mla = KvLayout.attention(
        model="mla",
        dtype="bfloat16",
        layer_count=_LAYERS,
        kv_head_count=1,
        block_tokens=64,
        parts={"kv": 576 * 2},
        tensor_parallel_size=8,
    )
    gqa = KvLayout.attention(
        model="gqa",
        dtype="bfloat16",
        layer_count=_LAYERS,
        kv_head_count=8,
        block_tokens=16,
        parts={"k": 128 * 2, "v": 128 * 2},
        tensor_parallel_size=8,
    )
    small_blocks = replace(mla, groups=(replace(mla.groups[0], block_tokens=16),))
    same, mixed = (HEAD_OUTER, HEAD_OUTER), (TOKENS_OUTER, HEAD_OUTER)
    found = []
    for name, layout, orders in (
        ("MLA, blocks of 64", mla, same),
        ("MLA, blocks of 16", small_blocks, same),
        ("GQA, blocks of 16", gqa, same),
    ):
        decode = replace(layout, tensor_parallel_size=4)
        found += [
            Case(name, layout, decode, orders, fragments)
            for fragments in (1, 64, tokens // layout.block_tokens)
        ]
    bigger = replace(small_blocks.groups[0], block_tokens=48)
    decode = replace(small_blocks, tensor_parallel_size=4, groups=(bigger,))
    found.append(Case("MLA, 16 to 48", small_blocks, decode, same, tokens // 48))
    decode = replace(gqa, tensor_parallel_size=4)
    found.append(Case("GQA, token-outer to head-outer", gqa, decode, mixed, 64))
    return found


def make_dear_case(tokens: int) -> Case:
    """Ranks of several heads between layouts that do not slice: every token and head is a run in any plan."""
    gqa = next(case for case in make_cases(tokens) if case.name.startswith("GQA"))
    return Case(
        "GQA 2 to 4, by token",
        replace(gqa.prefill, tensor_parallel_size=2),
        gqa.decode,
        (TOKENS_OUTER, HEAD_OUTER),
        64,
    )


def block_list(count: int, fragments: int, seed: int) -> tuple[int, ...]:
    """`count` blocks in about `fragments` ascending runs, in random order with gaps between."""
    size = -(-count // min(fragments, count))
    stretches = [
        range(at + number, at + number + min(size, count - at))
        for number, at in enumerate(range(0, count, size))
    ]
    random.Random(seed).shuffle(stretches)
    return tuple(block for stretch in stretches for block in stretch)


def make_memories(
    layout: KvLayout, order: Sequence[Dimension], base: int, blocks: int
) -> list[RankMemory]:
    """Addresses only, because planning reads no memory."""
    memories = []
    for rank in range(layout.rank_count):
        placed = place_regions(layout, rank, (blocks,), order)
        memories.append(
            RankMemory(rank, "none", f"{rank}", base, placed.arena_bytes, placed.regions)
        )
    return memories


def plan(
    case: Case,
    planners: list[list[CopyPlanner]],
    source_ids: tuple[int, ...],
    destination_ids: tuple[int, ...],
    tokens: int,
    transfer_id: str,
) -> tuple[float, int, int]:
    """Seconds of planning, bytes and runs, with planners that have no state of this transfer."""
    reservation = Reservation(transfer_id, destination_ids, 0, tokens)
    payload_bytes = run_count = 0
    start_s = time.perf_counter()
    ledger = Ledger(case.decode, case.prefill, reservation)
    for rank, to_ranks in enumerate(planners):
        write_plan = WritePlan(transfer_id, rank, case.prefill, case.decode)
        write_plan.reserve(reservation)
        for layer in range(case.prefill.layer_count):
            for edge, span in write_plan.claim(
                LayerRange(transfer_id, layer, 0, tokens, source_ids, 0)
            ):
                destination = edge.destination_rank
                runs = to_ranks[destination].plan(edge, layer, span)
                nbytes = runs.payload_bytes
                write_plan.landed(layer, destination, tokens)
                ledger.land((rank, destination, layer), 0, tokens, nbytes)
                payload_bytes += nbytes
                run_count += len(runs)
    spent_s = time.perf_counter() - start_s
    if not ledger.complete:
        raise SystemExit(f"{case.name}: the plan leaves out {ledger.missing()}")
    return spent_s, payload_bytes, run_count


def memcpy_s(source: NDArray[np.uint8], destination: NDArray[np.uint8]) -> float:
    """Seconds for one copy of the buffer."""
    start_s = time.perf_counter()
    np.copyto(destination, source)
    return time.perf_counter() - start_s


def measure(case: Case, tokens: int, rounds: int) -> Figures:
    """Medians over rounds that alternate between planning and copying."""
    source_ids = block_list(case.prefill.blocks_for(tokens), case.fragments, 1)
    destination_ids = block_list(case.decode.blocks_for(tokens), case.fragments, 2)
    sources = make_memories(case.prefill, case.orders[0], 1 << 44, max(source_ids) + 1)
    destinations = make_memories(case.decode, case.orders[1], 1 << 45, max(destination_ids) + 1)
    planners = [[CopyPlanner(source, other) for other in destinations] for source in sources]
    buffers = [np.ones(_MEMCPY_BYTES, dtype=np.uint8) for _ in range(2)]
    planned, copied = [], []
    payload_bytes = run_count = 0
    for number in range(rounds):
        copied.append(memcpy_s(*buffers))
        found = plan(case, planners, source_ids, destination_ids, tokens, f"x{number}")
        planned.append(found[0])
        payload_bytes, run_count = found[1:]
    scale = payload_bytes / _MEMCPY_BYTES
    return Figures(
        case,
        statistics.median(planned),
        statistics.median(copied) * scale,
        payload_bytes,
        run_count,
    )


def show(figures: Figures) -> None:
    """Prints one line of the table."""
    case = figures.case
    print(
        f"{case.name:32} {case.fragments:9} {figures.payload_bytes / 1e9:6.1f} "
        f"{figures.run_count:10} {figures.plan_s * 1e3:8.1f} {figures.memcpy_s * 1e3:10.0f} "
        f"{figures.percent:5.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=131_072, help="tokens of the prompt")
    parser.add_argument("--rounds", type=int, default=5, help="of which the median counts")
    options = parser.parse_args()
    print(
        f"{options.tokens} tokens, {_LAYERS} layers, 8 prefill ranks to 4 decode ranks but for the last line"
    )
    print(
        f"{'case':32} {'fragments':>9} {'GB':>6} {'runs':>10} {'plan ms':>8} {'memcpy ms':>10}   %"
    )
    worst = 0.0
    for case in make_cases(options.tokens):
        figures = measure(case, options.tokens, options.rounds)
        worst = max(worst, figures.percent)
        show(figures)
    show(measure(make_dear_case(options.tokens), options.tokens, 1))
    verdict = "below" if worst < _TARGET_PERCENT else "NOT below"
    print(
        f"8 to 4: the dearest plan costs {worst:.2f} % of its memcpy: {verdict} {_TARGET_PERCENT:g} %"
    )


if __name__ == "__main__":
    main()
