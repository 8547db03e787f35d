"""Registered memory, its allocation and copies within it: a host's here, a device's in headrace_engine.torch_memory."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from headrace_common.errors import ConfigError, TransferFailed
from headrace_kv.copy_plan import Int64Array, Runs

PAGE_BYTES = 4096
WORD_BYTES: Final = 4
WORD_FACTOR: Final = 0x9E3779B97F4A7C15
_SUMMED_BYTES: Final = 256 * 1024
HUGE_PAGE_BYTES = 2 * 1024 * 1024


def suited_alignment_bytes(nbytes: int) -> int:
    """Alignment for an arena of `nbytes`: huge pages when it fills several, else pages, so that little is wasted."""
    return HUGE_PAGE_BYTES if nbytes >= 8 * HUGE_PAGE_BYTES else PAGE_BYTES


def allocate_arena(nbytes: int, alignment_bytes: int) -> NDArray[np.uint8]:
    """Uninitialised memory of shape [nbytes] that starts at a multiple of the alignment.

    At most `alignment_bytes` more are allocated. Raises ConfigError unless the alignment is a power of two and `nbytes`
    is positive.
    """
    if nbytes <= 0:
        raise ConfigError(f"an arena cannot have {nbytes} bytes")
    if alignment_bytes <= 0 or alignment_bytes & (alignment_bytes - 1):
        raise ConfigError(f"an alignment is a power of two, not {alignment_bytes}")
    raw = np.empty(nbytes + alignment_bytes - 1, np.uint8)
    skipped = -int(raw.ctypes.data) % alignment_bytes
    return raw[skipped : skipped + nbytes]


def require_available(nbytes: int, setting: str) -> None:
    """Raises ConfigError when the host or the container has less memory than `setting` asks for."""
    available = available_bytes()
    if nbytes > available:
        raise ConfigError(
            f"{setting} asks for {nbytes / 2**30:.1f} GiB, and {available / 2**30:.1f} GiB of memory are available: "
            f"lower {setting}",
            metadata={"field": setting},
        )


def available_bytes(
    meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")
) -> int:
    """Memory that can be taken without swapping: proc_meminfo(5), and the limit of a container's cgroup (version 2)."""
    host = 1024 * _table(meminfo)["MemAvailable:"]
    try:
        limit = (cgroup / "memory.max").read_text(encoding="ascii").strip()
        used = int((cgroup / "memory.current").read_text(encoding="ascii"))
        # Files that were read once are given up first.
        used -= _table(cgroup / "memory.stat")["inactive_file"]
    except FileNotFoundError:
        return host
    return host if limit == "max" else min(host, int(limit) - used)


def _table(path: Path) -> dict[str, int]:
    """Numbers by the name in front of them."""
    lines = path.read_text(encoding="ascii").splitlines()
    return {name: int(number) for name, number, *_ in map(str.split, lines)}


class MemoryRanges:
    """Ranges [start, end) of addresses. Threads may call `covers` while another adds a range."""

    def __init__(self, spans: tuple[tuple[int, int], ...] = ()) -> None:
        self.spans = spans

    def add(self, base_address: int, nbytes: int) -> None:
        """Adds [base_address, base_address + nbytes)."""
        self.spans = (*self.spans, (base_address, base_address + nbytes))

    def covers(self, addresses: Int64Array, lengths: Int64Array) -> bool:
        """Whether every [addresses[i], addresses[i] + lengths[i]) lies within one range. Shapes [run]."""
        if not len(addresses):
            return True
        ends = addresses + lengths
        low, high = np.minimum.reduce(addresses), np.maximum.reduce(ends)
        for start, end in self.spans:
            if start <= low and high <= end:
                return True
        inside = np.zeros(len(addresses), np.bool_)
        for start, end in self.spans:
            inside |= (addresses >= start) & (ends <= end)
        return bool(inside.all())


class WordSums(Protocol):
    """Memory that is summed where it is."""

    def word_sum(self, addresses: Int64Array, lengths: Int64Array, seed: int) -> int:
        """The word sum of runs in this order, see handoff.proto. Addresses and lengths are multiples of 4.

        Shapes [run]. Blocks. Raises TransferFailed.
        """
        ...


class Memory(WordSums, Protocol):
    """The memory of one process that holds the ends of runs. Any thread may call its methods."""

    on_host: bool
    """Whether this process can read it by address."""

    staged: bool
    """Whether transports cannot reach it, so that every byte is copied through host memory."""

    def admit(self, base_address: int, nbytes: int) -> None:
        """Raises ConfigError unless [base_address, base_address + nbytes) is such memory and not empty."""

    def allocate(self, nbytes: int) -> Bytes:
        """Allocates host memory for a staging or landing area."""

    def gather(self, addresses: Int64Array, lengths: Int64Array, target: Bytes) -> None:
        """As packing.gather; returns when `target` holds the bytes."""

    def scatter(self, source: Bytes, addresses: Int64Array, lengths: Int64Array) -> None:
        """As packing.scatter; returns when the bytes are in place and `source` may be used again."""


class HostMemory:
    """The host memory of this process."""

    on_host = True
    staged = False

    def admit(self, base_address: int, nbytes: int) -> None:
        if nbytes <= 0:
            raise ConfigError(f"cannot register {nbytes} bytes of KV memory at {base_address:#x}")

    def allocate(self, nbytes: int) -> Bytes:
        return np.empty(nbytes, np.uint8)

    def gather(self, addresses: Int64Array, lengths: Int64Array, target: Bytes) -> None:
        gather(addresses, lengths, target)

    def scatter(self, source: Bytes, addresses: Int64Array, lengths: Int64Array) -> None:
        scatter(source, addresses, lengths)

    def word_sum(self, addresses: Int64Array, lengths: Int64Array, seed: int) -> int:
        return packed_word_sum(self, addresses, lengths, seed)


HOST_MEMORY = HostMemory()


def packed_word_sum(memory: Memory, addresses: Int64Array, lengths: Int64Array, seed: int) -> int:
    """As WordSums.word_sum, by copies to this process."""
    buffer = memory.allocate(min(_SUMMED_BYTES, int(lengths.sum())))
    total = first_word = 0
    ordered = Runs(addresses, addresses, lengths)
    for part in ordered.batches(max(1, len(ordered)), _SUMMED_BYTES):
        memory.gather(part.source_addresses, part.lengths, buffer)
        words = buffer[: part.payload_bytes].view(np.uint32).astype(np.uint64)
        numbers = np.arange(first_word, first_word + len(words), dtype=np.uint64)
        words *= (numbers * np.uint64(WORD_FACTOR) + np.uint64(seed)) | np.uint64(1)
        total += int(words.sum())
        first_word += len(words)
    return total % 2**64


def kind_of(memory: Memory) -> str:
    """ "host", "device", or "device_staged" for a device that transports cannot reach."""
    if memory.on_host:
        return "host"
    return "device_staged" if memory.staged else "device"


Bytes = NDArray[np.uint8]


class Piece(NamedTuple):
    """Runs of a device, by address and length, and the host memory with the same bytes one after the other."""

    addresses: Int64Array
    lengths: Int64Array
    area: Bytes


def bytes_at(address: int, nbytes: int) -> Bytes:
    """Memory of this process as an array, not a copy. The caller keeps it alive."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def by_length(lengths: Int64Array) -> Int64Array | None:
    """An order of the runs in which equal lengths are adjacent, None when they already are."""
    if len(lengths) < 2 or np.all(lengths == lengths[0]):
        return None
    return np.argsort(lengths, kind="stable")


# Fewer runs of a length are copied one by one, because a numpy call costs as much.
_FEW_RUNS = 16


def gather(addresses: Int64Array, lengths: Int64Array, target: Bytes) -> None:
    """Copies [addresses[i], addresses[i] + lengths[i]) one after the other to the start of `target`. Shapes [run]."""
    _copy_packed(target, addresses, lengths, gathers=True)


def scatter(source: Bytes, addresses: Int64Array, lengths: Int64Array) -> None:
    """Copies consecutive bytes of `source` to [addresses[i], addresses[i] + lengths[i]). Shapes [run]."""
    _copy_packed(source, addresses, lengths, gathers=False)


def _copy_packed(
    packed: Bytes, addresses: Int64Array, lengths: Int64Array, *, gathers: bool
) -> None:
    for first, stop, length, offset in _equal_lengths(lengths):
        some = addresses[first:stop]
        if len(some) < _FEW_RUNS:
            at = int(packed.ctypes.data) + offset
            for address in some.tolist():
                target, source = (at, address) if gathers else (address, at)
                ctypes.memmove(target, source, length)
                at += length
            continue
        rows = packed[offset : offset + len(some) * length].reshape(-1, length)
        memory, index = _rows(some, length)
        if not gathers:
            memory[index] = rows
        elif memory.flags.c_contiguous:
            np.take(memory, index, axis=0, out=rows, mode="clip")
        else:
            rows[...] = memory[index]


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
    return as_strided(bytes_at(low, nbytes), (count, length), (step, 1)), offsets // step


_POLL_S: Final = 20e-6


class Mark(Protocol):
    """A point in the work that is queued on a device."""

    def query(self) -> bool:
        """Whether all work before the mark is done. Raises RuntimeError when the device has failed."""


class Passed:
    """The mark of a device that computes in the calling thread."""

    def query(self) -> bool:
        return True


PASSED: Final = Passed()


def wait_for(mark: Mark, timeout_s: float) -> bool:
    """Whether the mark is passed within the time. Polls, because CUDA's own waits have no timeout.

    Raises TransferFailed when the device has failed.
    """
    deadline_s = time.monotonic() + timeout_s
    try:
        while not mark.query():
            if time.monotonic() >= deadline_s:
                return False
            time.sleep(_POLL_S)
    except RuntimeError as error:
        raise TransferFailed(f"the device has failed: {error}") from error
    return True
