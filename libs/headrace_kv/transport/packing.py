"""Copies many short runs within this process, also to and from one contiguous buffer."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from headrace_kv.plan.copy_plan import Int64Array, Runs

Bytes = NDArray[np.uint8]


def copy_runs(runs: Runs) -> None:
    """Copies runs within this process, one after the other. Other threads run meanwhile.

    Adjacent runs at equal distances are one copy, such as the runs of a block in all layers. Each copy takes Python's
    lock once.
    """
    sources, destinations = runs.source_addresses, runs.destination_addresses
    for first, stop in _equal_distances(runs):
        length = int(runs.lengths[first])
        if stop - first == 1:
            ctypes.memmove(int(destinations[first]), int(sources[first]), length)
        else:
            shape = (stop - first, length)
            np.copyto(_view(destinations[first:], shape), _view(sources[first:], shape))


def _equal_distances(runs: Runs) -> Iterator[tuple[int, int]]:
    """(first run, one past the last) of sequences of runs with equal lengths and distances, on both sides."""
    count = len(runs)
    equal = np.diff(runs.lengths) == 0
    # Whether runs i, i + 1 and i + 2 are such a sequence.
    alike = equal[1:] & equal[:-1]
    for addresses in (runs.source_addresses, runs.destination_addresses):
        alike &= np.diff(addresses, 2) == 0
    first = 0
    for last in (*np.flatnonzero(~alike).tolist(), count - 2):
        if last >= first:
            stop = last + 2 if last > first else first + 1
            yield first, stop
            first = stop
    for single in range(first, count):
        yield single, single + 1


@dataclass(frozen=True, slots=True)
class _Memory:
    """Memory of this process, in the form that numpy makes arrays of."""

    __array_interface__: dict[str, object]


def _view(addresses: Int64Array, shape: tuple[int, int]) -> Bytes:
    """Rows of bytes, not a copy. The first two start at the first two addresses."""
    first = int(addresses[0])
    strides = (int(addresses[1]) - first, 1)
    place = {"data": (first, False), "shape": shape, "strides": strides, "typestr": "|u1"}
    return np.asarray(_Memory({**place, "version": 3}))


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
