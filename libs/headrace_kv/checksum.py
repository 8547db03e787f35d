"""Digests of layer ranges, computed from the source bytes by the sender and from the landed bytes by the receiver.

A digest is 64-bit XXH3 over the range's bytes by ascending destination address. Both sides derive that order from the
copy plan, so it depends neither on their layouts nor on the transport. The seed comes from the handoff ticket, so a
digest is valid for one handoff only. Where decode's memory is on a device, a word sum takes the place of the XXH3.
"""

from __future__ import annotations

import ctypes
from typing import Final, Literal, NamedTuple, cast

import numpy as np
from xxhash import xxh3_64, xxh3_64_intdigest

from headrace_kv.runs import Int64Array, Runs
from headrace_kv.transport.memory import Memory, WordSums

DigestMode = Literal["off", "sampled", "on"]
SAMPLED_SHARE: Final = 1 / 16
"""The part of all (transfer, layer) pairs that have digests in mode `sampled`."""

# Fits a core's own cache beside the source of the gather.
_CHUNK_BYTES: Final = 256 * 1024
# Runs of this many bytes are read in place, without a gather.
_LONG_RUN_BYTES: Final = 8192


def digest_share(mode: DigestMode) -> float:
    """The part of all (transfer, layer) pairs that have digests, 0 to 1."""
    return {"off": 0.0, "sampled": SAMPLED_SHARE, "on": 1.0}[mode]


def is_digested(share: float, transfer_id: str, layer: int) -> bool:
    """Whether a layer of a transfer has digests. Gives the same answer on both sides."""
    return xxh3_64_intdigest(f"{layer}:{transfer_id}".encode()) < share * 2.0**64


class DigestTerms(NamedTuple):
    """What a decode worker wants: digests of a `share` of layers. With `word_sums`, these are word sums."""

    share: float
    word_sums: bool = False


def source_digest(memory: Memory, runs: Runs, seed: int, *, word_sum: bool = False) -> int:
    """Digest of the bytes that the runs copy, read from `memory`."""
    return _digest(memory, runs, runs.source_addresses, seed, word_sum)


def destination_digest(memory: WordSums, runs: Runs, seed: int, *, word_sum: bool = False) -> int:
    """Digest of the bytes at the destinations of the runs. A Memory, unless it is a word sum."""
    return _digest(memory, runs, runs.destination_addresses, seed, word_sum)


def _digest(summed: WordSums, runs: Runs, addresses: Int64Array, seed: int, word_sum: bool) -> int:
    lengths = runs.lengths
    if len(runs) > 1 and bool((np.diff(runs.destination_addresses) < 0).any()):
        order = np.argsort(runs.destination_addresses)
        addresses, lengths = addresses[order], lengths[order]
    if word_sum:
        return summed.word_sum(addresses, lengths, seed)
    memory = cast("Memory", summed)
    state = xxh3_64(seed=seed)
    if memory.on_host and len(lengths) and lengths.mean() >= _LONG_RUN_BYTES:
        for address, length in zip(addresses.tolist(), lengths.tolist(), strict=True):
            state.update((ctypes.c_uint8 * length).from_address(address))
        return state.intdigest()
    buffer = memory.allocate(min(_CHUNK_BYTES, int(lengths.sum())))
    ordered = Runs(addresses, addresses, lengths)
    for batch in ordered.batches(max(1, len(ordered)), _CHUNK_BYTES):
        memory.gather(batch.source_addresses, batch.lengths, buffer)
        state.update(buffer[: batch.payload_bytes].data)
    return state.intdigest()
