"""Measures from which length on runs should be written one by one, between two processes of this machine.

    python -m bench.transport_costs [--rounds 5] [--mebibytes 64] [--output bench/results]

Writes runs of one length in shuffled order: each as an entry of its own, and staged on both sides. The two ways take
turns. The thresholds of headrace_kv/transport/mooncake.py are from here.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections import deque
from concurrent.futures import Future
from pathlib import Path

import numpy as np

from bench.data_plane.ways import HOST, KIB, MIB, TIMEOUT_S, Bytes, Receiver, block_orders
from headrace_kv.copy_plan import Runs
from headrace_kv.transport.base import KvTransport, Thresholds, WriteResult
from headrace_kv.transport.mooncake import MooncakeTransport
from headrace_kv.transport.staging import StagedTransport

RUN_BYTES = [KIB, 4 * KIB, 16 * KIB, 32 * KIB, 64 * KIB, 128 * KIB, 256 * KIB, MIB]
RUNS_MAX, PIECE_BYTES = 2048, 4 * MIB
ALL_STAGED = Thresholds(long_bytes=1 << 40, few_entries=0)
FEW = (1, 2, 4, 8, 16, 32)


def taken_s(transport: KvTransport, session: str, pieces: list[Runs]) -> float:
    """Seconds for all runs, with as many writes under way as the transport permits."""
    pending: deque[Future[WriteResult]] = deque()
    start_s = time.perf_counter()
    for piece in pieces:
        if len(pending) == transport.pending_limit:
            pending.popleft().result(TIMEOUT_S)
        pending.append(transport.submit(session, piece, TIMEOUT_S))
    for future in pending:
        future.result(TIMEOUT_S)
    return time.perf_counter() - start_s


def planned(source: Bytes, destination: int, length: int, count: int = RUNS_MAX) -> Runs:
    """Up to `count` runs of one length in shuffled order."""
    sources, destinations = (order[:count] for order in block_orders(len(source), length))
    lengths = np.full(len(sources), length, np.int64)
    return Runs(source.ctypes.data + sources * length, destination + destinations * length, lengths)


def compare(
    ways: dict[str, KvTransport], session: str, pieces: list[Runs], rounds: int
) -> dict[str, float]:
    """The median seconds of each way, in interleaved rounds after one that is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, transport in ways.items():
            seconds[name].append(taken_s(transport, session, pieces))
    return {name: statistics.median(values[1:]) for name, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures when runs should be staged.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mebibytes", type=int, default=64, help="of memory, at least 4")
    parser.add_argument("--output", type=Path, help="folder for the tables")
    options = parser.parse_args()
    source = np.ones(options.mebibytes * MIB, np.uint8)
    receiver = Receiver("mooncake", len(source))
    session, destination = receiver.facts["session"], receiver.facts["memory"]
    ways: dict[str, KvTransport] = {
        "one by one": MooncakeTransport(HOST, "tcp"),
        "staged": StagedTransport(MooncakeTransport(HOST, "tcp"), HOST, ALL_STAGED),
    }
    for transport in ways.values():
        transport.register(source.ctypes.data, source.nbytes)
    lines = ["| run | one by one, us a run | staged, us a run |", "|---|---|---|"]
    for length in RUN_BYTES:
        runs = planned(source, destination, length)
        found = compare(ways, session, list(runs.batches(1 << 20, PIECE_BYTES)), options.rounds)
        cells = " | ".join(f"{value / len(runs) * 1e6:.1f}" for value in found.values())
        lines.append(f"| {length // KIB} KiB | {cells} |")
    lines += ["", "| runs of 1 KiB | one by one, us | staged, us |", "|---|---|---|"]
    for count in FEW:
        runs = planned(source, destination, KIB, count)
        found = compare(ways, session, [runs], options.rounds * 10)
        cells = " | ".join(f"{value * 1e6:.0f}" for value in found.values())
        lines.append(f"| {count} | {cells} |")
    text = "\n".join(lines)
    print(text)
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "transport_costs.md").write_text(text + "\n")
    receiver.end()
    os._exit(0)


if __name__ == "__main__":
    main()
