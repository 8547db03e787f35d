"""Copies many short runs within this process, also to and from one contiguous buffer."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from headrace_kv.plan.copy_plan import Int64Array, Runs

Bytes = NDArray[np.uint8]


def copy_runs(runs: Runs) -> None:
    """Copies runs within this process, one after the other. Other threads run during long ones."""
    for source, destination, length in zip(
        runs.source_addresses.tolist(),
        runs.destination_addresses.tolist(),
        runs.lengths.tolist(),
        strict=True,
    ):
        ctypes.memmove(destination, source, length)


def by_length(lengths: Int64Array) -> Int64Array | None:
    """An order of the runs in which equal lengths are adjacent, None when they already are."""
    if len(lengths) < 2 or np.all(lengths == lengths[0]):
        return None
    return np.argsort(lengths, kind="stable")


# Fewer runs of a length are copied one by one, because a numpy call costs as much.
_FEW_RUNS = 16


def gather(addresses: Int64Array, lengths: Int64Array, target: Bytes) -> None:
    """Copies [addresses[i], addresses[i] + lengths[i]) one after the other to the start of `target`. Shapes [run]."""
    for first, stop, length, offset in _equal_lengths(lengths):
        if stop - first < _FEW_RUNS:
            packed = int(target.ctypes.data) + offset
            for address in addresses[first:stop].tolist():
                ctypes.memmove(packed, address, length)
                packed += length
            continue
        rows = target[offset : offset + (stop - first) * length].reshape(-1, length)
        memory, index = _rows(addresses[first:stop], length)
        if memory.flags.c_contiguous:
            np.take(memory, index, axis=0, out=rows, mode="clip")
        else:
            rows[...] = memory[index]


def scatter(source: Bytes, addresses: Int64Array, lengths: Int64Array) -> None:
    """Copies consecutive bytes of `source` to [addresses[i], addresses[i] + lengths[i]). Shapes [run]."""
    for first, stop, length, offset in _equal_lengths(lengths):
        if stop - first < _FEW_RUNS:
            packed = int(source.ctypes.data) + offset
            for address in addresses[first:stop].tolist():
                ctypes.memmove(address, packed, length)
                packed += length
            continue
        rows = source[offset : offset + (stop - first) * length].reshape(-1, length)
        memory, index = _rows(addresses[first:stop], length)
        memory[index] = rows


def _equal_lengths(lengths: Int64Array) -> Iterator[tuple[int, int, int, int]]:
    """(first run, one past the last, length, offset of the first) of each sequence of runs with equal lengths."""
    breaks = np.flatnonzero(np.diff(lengths)) + 1
    offset = 0
    first = 0
    for stop in (*breaks.tolist(), len(lengths)):
        if stop > first:
            length = int(lengths[first])
            yield first, stop, length, offset
            offset += (stop - first) * length
            first = stop


def _rows(addresses: Int64Array, length: int) -> tuple[Bytes, Int64Array]:
    """A view of memory in rows of `length` bytes, and the row of each address, so that numpy copies whole rows."""
    low = int(addresses.min())
    offsets = addresses - low
    step = int(np.gcd.reduce(offsets)) or length
    if step % length == 0:
        step = length
    count = int(offsets.max()) // step + 1
    nbytes = (count - 1) * step + length
    flat = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(low))
    return as_strided(flat, (count, length), (step, 1)), offsets // step
