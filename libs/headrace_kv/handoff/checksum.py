"""Digests of what was sent and of what has landed: 64 bits for each piece of a layer that one rank sends another.

A digest is XXH3 over the piece's bytes by ascending destination address. Both sides derive that order from the plan,
whatever their layouts and however the bytes travelled.
"""

from __future__ import annotations

import ctypes
from typing import Final, Literal

import numpy as np
from xxhash import xxh3_64, xxh3_64_intdigest

from headrace_kv.plan.runs import Int64Array, Runs
from headrace_kv.transport.memory import Memory

DigestMode = Literal["off", "sampled", "on"]
SAMPLED_SHARE: Final = 1 / 16
"""The part of all (transfer, layer) pairs that `sampled` takes."""

# Fits a core's own cache beside what is gathered from.
_CHUNK_BYTES: Final = 256 * 1024
# Runs of this many bytes are read where they lie.
_LONG_RUN_BYTES: Final = 8192


def digest_share(mode: DigestMode) -> float:
    """The part of all (transfer, layer) pairs that have a digest, 0 to 1."""
    return {"off": 0.0, "sampled": SAMPLED_SHARE, "on": 1.0}[mode]


def is_digested(share: float, transfer_id: str, layer: int) -> bool:
    """Whether a layer of a transfer has digests. Both sides decide alike."""
    if share <= 0.0:
        return False
    return xxh3_64_intdigest(f"{layer}:{transfer_id}".encode()) < share * 2.0**64


def source_digest(memory: Memory, runs: Runs) -> int:
    """Of the bytes that the runs copy."""
    return _digest(memory, runs, runs.source_addresses)


def destination_digest(memory: Memory, runs: Runs) -> int:
    """Of the bytes where the runs copy to."""
    return _digest(memory, runs, runs.destination_addresses)


def _digest(memory: Memory, runs: Runs, addresses: Int64Array) -> int:
    lengths = runs.lengths
    if len(runs) > 1 and bool((np.diff(runs.destination_addresses) < 0).any()):
        order = np.argsort(runs.destination_addresses)
        addresses, lengths = addresses[order], lengths[order]
    state = xxh3_64()
    if memory.on_host and len(lengths) and lengths.mean() >= _LONG_RUN_BYTES:
        for address, length in zip(addresses.tolist(), lengths.tolist(), strict=True):
            state.update((ctypes.c_uint8 * length).from_address(address))
        return state.intdigest()
    buffer = memory.allocate(min(_CHUNK_BYTES, int(lengths.sum())))
    pieces = Runs(addresses, addresses, lengths)
    for batch in pieces.batches(max(1, len(pieces)), _CHUNK_BYTES):
        memory.gather(batch.source_addresses, batch.lengths, buffer)
        state.update(buffer[: batch.payload_bytes].data)
    return state.intdigest()
