"""Moves the same bytes between two processes of this host in blocks of equal size, by every available way.

    python -m bench.data_plane [--rounds 7] [--mebibytes 64] [--kinds mooncake,raw_tcp,...] [--output bench/results]

Blocks are in shuffled order on both sides. Ours is measured at `KvTransport.submit`, without planning. Every round
runs each way once, so that a busy moment affects all ways equally. A cell is the best round in GB/s. The raw packed
way gathers, writes 1 MiB pieces and scatters, one after the other. raw_mooncake_staged is the writing alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from bench.data_plane.report import ratio_table, table
from bench.data_plane.ways import KIB, KINDS, MIB, WAYS, Ours

BLOCK_BYTES = [KIB, 4 * KIB, 16 * KIB, 64 * KIB, 144 * KIB, 256 * KIB, MIB, 2 * MIB]


def run(
    kinds: list[str], blocks: list[int], total: int, rounds: int
) -> dict[int, dict[str, list[float]]]:
    """Seconds of every round, by block size and column."""
    source = np.random.default_rng(0).integers(0, 256, total, np.uint8)
    ways = [WAYS[kind](kind, source) for kind in kinds]
    seconds: dict[int, dict[str, list[float]]] = {}
    try:
        for block in blocks:
            columns = seconds.setdefault(block, {})
            for way in ways:
                way.prepare(block)
                way.check(block)
            for _ in range(rounds):
                for way in ways:
                    for column, taken_s in way.measure(block).items():
                        columns.setdefault(column, []).append(taken_s)
            best = rates({block: columns}, total, min)[block]
            cells = ", ".join(f"{name} {rate:.2f}" for name, rate in best.items())
            how = "; ".join(
                f"{w.kind}: {', '.join(sorted(w.how))}" for w in ways if isinstance(w, Ours)
            )
            print(f"{block // KIB} KiB: {cells} GB/s ({how})", file=sys.stderr, flush=True)
    finally:
        for way in ways:
            way.receiver.end()
    return seconds


def rates(
    seconds: dict[int, dict[str, list[float]]], total: int, pick: Callable[[list[float]], float]
) -> dict[int, dict[str, float]]:
    """GB/s by block size and column."""
    return {
        block: {name: total // block * block / pick(values) / 1e9 for name, values in row.items()}
        for block, row in seconds.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--mebibytes", type=int, default=64)
    parser.add_argument("--kinds", default="", help=f"of {','.join(KINDS)}")
    parser.add_argument("--output", type=Path, help="folder for the table and the figures")
    parser.add_argument("--blocks", default="", help="KiB, default all")
    parser.add_argument(
        "--piece", type=int, default=4096, help="KiB of payload that ours submits at once"
    )
    options = parser.parse_args()
    Ours.submitted_bytes = options.piece * KIB
    blocks = [int(b) * KIB for b in options.blocks.split(",")] if options.blocks else BLOCK_BYTES
    has_nixl = importlib.util.find_spec("nixl_cu12") is not None
    # UCX reads its environment once, so a run can use only one of its transports.
    nixl = ["nixl_tcp" if "tcp" in os.environ.get("UCX_TLS", "") else "nixl_auto"]
    kinds = options.kinds.split(",") if options.kinds else [*KINDS[:3], *nixl * has_nixl]
    total = options.mebibytes * MIB
    seconds = run(kinds, blocks, total, options.rounds)
    best = rates(seconds, total, min)
    text = "\n\n".join(
        [
            f"GB/s, best of {options.rounds} interleaved rounds, {options.mebibytes} MiB",
            table(best),
            ratio_table(best),
            "Medians, GB/s",
            table(rates(seconds, total, statistics.median)),
        ]
    )
    print(text)
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "data_plane.md").write_text(text + "\n")
        (options.output / "data_plane.json").write_text(json.dumps(seconds))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
