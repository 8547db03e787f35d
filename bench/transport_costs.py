"""Measures the constants of headrace_kv/transport/staging/cost_model.py between two processes of this machine.

    python -m bench.transport_costs [--rounds 5] [--mebibytes 64]

Writes many sizes, entry by entry and several at once, as the data plane does. The best round of each size counts.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import deque
from concurrent.futures import Future

import numpy as np

from bench.data_plane.ways import HOST, KIB, MIB, TIMEOUT_S, Bytes, Receiver, block_orders
from headrace_kv.plan.copy_plan import Runs
from headrace_kv.transport.base import WriteResult
from headrace_kv.transport.mooncake.transport import MooncakeTransport
from headrace_kv.transport.staging.cost_model import direct_bytes_min, initial_costs

ENTRY_BYTES = [KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB]
ENTRIES_MAX, PIECE_BYTES = 2048, 4 * MIB


def taken_s(transport: MooncakeTransport, session: str, pieces: list[Runs]) -> float:
    """Seconds for all entries, with as many under way as the transport permits."""
    pending: deque[Future[WriteResult]] = deque()
    start_s = time.perf_counter()
    for piece in pieces:
        if len(pending) == transport.pending_limit:
            pending.popleft().result(TIMEOUT_S)
        pending.append(transport.submit(session, piece, TIMEOUT_S))
    for future in pending:
        future.result(TIMEOUT_S)
    return time.perf_counter() - start_s


def planned(source: Bytes, destination: int, entry: int) -> list[Runs]:
    """Up to ENTRIES_MAX entries of one size in shuffled order."""
    sources, destinations = (order[:ENTRIES_MAX] for order in block_orders(len(source), entry))
    lengths = np.full(len(sources), entry, np.int64)
    runs = Runs(source.ctypes.data + sources * entry, destination + destinations * entry, lengths)
    return list(runs.batches(1 << 20, PIECE_BYTES))


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures what entries and bytes cost.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mebibytes", type=int, default=64, help="of memory, at least 4")
    options = parser.parse_args()
    source = np.ones(options.mebibytes * MIB, np.uint8)
    receiver = Receiver("mooncake", len(source))
    session, destination = receiver.facts["session"], receiver.facts["memory"]
    transport = MooncakeTransport(HOST, "tcp")
    transport.register(source.ctypes.data, source.nbytes)
    rows = []
    for entry in ENTRY_BYTES:
        pieces = planned(source, destination, entry)
        best_s = min(taken_s(transport, session, pieces) for _ in range(options.rounds))
        count = sum(len(piece) for piece in pieces)
        rows.append((count, count * entry, best_s))
        rate = count * entry / best_s / 1e9
        print(f"{entry // KIB:5} KiB: {best_s / count * 1e6:8.1f} us an entry, {rate:.2f} GB/s")
    table = np.array(rows)
    weighted = table / table[:, 2:]
    constants, *_ = np.linalg.lstsq(weighted[:, :2], weighted[:, 2], rcond=None)
    print(f"entry_s={constants[0]:.2e} byte_s={constants[1]:.2e}")
    costs = initial_costs("mooncake/tcp")
    print(f"in the table, with this machine's memory: {costs}")
    print(f"runs of {direct_bytes_min(costs) / KIB:.0f} KiB and more go by themselves")
    receiver.end()
    os._exit(0)


if __name__ == "__main__":
    main()
