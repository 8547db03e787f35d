"""Opens KV memory and a transport on a device, and copies within that memory."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from headrace_common.errors import ConfigError, TransferFailed
from headrace_common.limits import write_quiet_s
from headrace_engine.torch_memory.stream_order import DeviceOrder, open_copy_stream, open_order
from headrace_kv.runs import Int64Array
from headrace_kv.tiers.copier import ADDRESSED_MEMORY, DeviceMemory
from headrace_kv.transport.base import KvTransport
from headrace_kv.transport.factory import open_transport
from headrace_kv.transport.guard import Networks
from headrace_kv.transport.memory import (
    HOST_MEMORY,
    PASSED,
    WORD_FACTOR,
    Bytes,
    Mark,
    MemoryRanges,
    Piece,
    gather,
)

_WORD_BYTES = 8


@dataclass(frozen=True, eq=False, slots=True)
class Segment:
    """Runs of `length` bytes at `offsets` in span number `span`. Packed, they start at `packed_offset`."""

    span: int
    offsets: Int64Array
    length: int
    packed_offset: int


@dataclass(frozen=True, eq=False, slots=True)
class Batch:
    """Packed bytes [start, stop) that go through the buffer at once. With `direct`, one long run without the buffer."""

    start: int
    stop: int
    segments: tuple[Segment, ...]
    direct: bool


@dataclass(frozen=True, eq=False, slots=True)
class Rows:
    """`count` rows of `words` words of `word_bytes` in a span, from `first_word` on and `step` words apart.

    `index` selects rows.
    """

    word_bytes: int
    words: int
    first_word: int
    step: int
    count: int
    index: Int64Array


def cut(
    spans: Sequence[tuple[int, int]], addresses: Int64Array, lengths: Int64Array
) -> Iterator[Segment]:
    """Segments of neighbouring runs that have one length and lie in one span [start, end). Drops empty runs.

    `spans` are sorted and do not overlap. Raises TransferFailed for a run outside all spans.
    """
    filled = lengths > 0
    if not filled.all():
        addresses, lengths = addresses[filled], lengths[filled]
    if not len(lengths):
        return
    starts = np.array([start for start, _ in spans], np.int64)
    ends = np.array([end for _, end in spans], np.int64)
    held = np.searchsorted(starts, addresses, side="right") - 1
    if not len(spans) or bool((held < 0).any() or (addresses + lengths > ends[held]).any()):
        raise TransferFailed("an address is not in the registered device memory")
    breaks = np.flatnonzero((np.diff(lengths) != 0) | (np.diff(held) != 0)) + 1
    packed_offset, first = 0, 0
    for stop in (*breaks.tolist(), len(lengths)):
        span, length = int(held[first]), int(lengths[first])
        yield Segment(span, addresses[first:stop] - starts[span], length, packed_offset)
        packed_offset += (stop - first) * length
        first = stop


def batch(segments: Iterator[Segment], buffer_bytes: int, direct_bytes: int) -> Iterator[Batch]:
    """Batches that fill the buffer. Runs of `direct_bytes` or more go alone. direct_bytes <= buffer_bytes."""
    waiting: list[Segment] = []
    start = stop = 0
    for segment in segments:
        length = segment.length
        first = 0
        while first < len(segment.offsets):
            direct = length >= direct_bytes
            room = 0 if direct else (buffer_bytes - (stop - start)) // length
            if room == 0 and waiting:
                yield Batch(start, stop, tuple(waiting), direct=False)
                waiting, start = [], stop
                continue
            count = 1 if direct else min(room, len(segment.offsets) - first)
            part = Segment(segment.span, segment.offsets[first : first + count], length, stop)
            first += count
            stop += count * length
            if direct:
                yield Batch(start, stop, (part,), direct=True)
                start = stop
            else:
                waiting.append(part)
    if waiting:
        yield Batch(start, stop, tuple(waiting), direct=False)


def rows_of(segment: Segment, buffer_offset: int) -> Rows:
    """The segment as rows of the widest words that it and its place in the buffer are aligned to."""
    low = int(segment.offsets.min())
    moved = segment.offsets - low
    apart = int(np.gcd.reduce(moved))
    word_bytes = int(np.gcd.reduce([_WORD_BYTES, low, apart, segment.length, buffer_offset]))
    words = segment.length // word_bytes
    step = apart // word_bytes or words
    if step % words == 0:
        # Rows that do not overlap need the fewest words of index.
        step = words
    index = moved // (step * word_bytes)
    return Rows(word_bytes, words, low // word_bytes, step, int(index.max()) + 1, index)


_COPY_TIMEOUT_S = 10.0
_COMPUTE_TIMEOUT_S = 30.0
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class CopyLimits:
    """Runs below `direct_bytes` are packed in a buffer of `buffer_bytes` on the device, others copied directly."""

    buffer_bytes: int = 4 * 1024 * 1024
    direct_bytes: int = 256 * 1024


@dataclass(frozen=True, eq=False, slots=True)
class _Span:
    """A whole allocation as bytes. Keeps the allocation alive."""

    start: int
    end: int
    data: Tensor

    def words(self, rows: Rows) -> Tensor:
        """Shape [row, word]; rows may overlap."""
        whole = self.data[: self.data.numel() // rows.word_bytes * rows.word_bytes]
        return whole.view(_WORDS[rows.word_bytes]).as_strided(
            (rows.count, rows.words), (rows.step, 1), rows.first_word
        )


class _Direction:
    """A stream and a buffer, one each for gathering and scattering: links to the host carry both at once."""

    def __init__(self, device: torch.device, buffer_bytes: int) -> None:
        self._lock = threading.Lock()
        self._stream = open_copy_stream(device)
        with self._stream.use():
            self.buffer = torch.empty(buffer_bytes, dtype=torch.uint8, device=device)

    @contextlib.contextmanager
    def copying(self, mark: Mark = PASSED) -> Iterator[None]:
        """Work that is queued inside begins after the mark. At the end, also after an error, waits for all of it.

        Raises TransferFailed.
        """
        with self._lock, self._stream.use():
            try:
                self._stream.wait(mark, _COMPUTE_TIMEOUT_S)
                yield
            finally:
                compute_s = 0.0 if mark is PASSED else _COMPUTE_TIMEOUT_S
                self._stream.drain(compute_s + _COPY_TIMEOUT_S)

    def packed(self, offset: int, rows: Rows) -> Tensor:
        """Part of the buffer, shape [run, word]."""
        stop = offset + len(rows.index) * rows.words * rows.word_bytes
        return self.buffer[offset:stop].view(_WORDS[rows.word_bytes]).view(-1, rows.words)


class TorchMemory:
    """Memory of one device, see transport.memory.Memory. Its copies go through page-locked host memory.

    With `direct`, transports read and write it themselves, and copies are only for peers that they do not reach.
    A caller of `gather` ensures that the bytes are written, a caller of `scatter` that no kernel reads them any more.
    `gather` also reads host memory of `hold_host`, from which transports send.
    """

    on_host = False

    def __init__(
        self, device: torch.device, limits: CopyLimits | None = None, *, direct: bool = False
    ) -> None:
        self.device = device
        self.staged = not direct
        self._limits = limits or CopyLimits()
        self._spans: tuple[_Span, ...] = ()
        self._host = MemoryRanges()
        self._gathering = _Direction(device, self._limits.buffer_bytes)
        self._scattering = _Direction(device, self._limits.buffer_bytes)

    def hold(self, tensor: Tensor) -> tuple[int, int]:
        """Adds the whole allocation of a tensor. Returns its address and its size in bytes.

        Raises ConfigError for another device, and for an address that is no multiple of eight.
        """
        storage = tensor.untyped_storage()
        address, nbytes = storage.data_ptr(), storage.nbytes()
        if tensor.device != self.device or address % max(_WORDS) or not nbytes:
            raise ConfigError(
                f"KV memory of {nbytes} bytes on {tensor.device} cannot be registered for {self.device}"
            )
        if all(span.start != address for span in self._spans):
            data = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)
            spans = (*self._spans, _Span(address, address + nbytes, data))
            self._spans = tuple(sorted(spans, key=lambda span: span.start))
        return address, nbytes

    def hold_host(self, base_address: int, nbytes: int) -> None:
        """Adds host memory that `gather` may read. The caller keeps it alive."""
        self._host.add(base_address, nbytes)

    def lock_pages(self, area: Bytes) -> None:
        """See DeviceMemory.lock_pages. Takes about as long as the kernel needs to give the memory its pages."""
        if self.device.type == "cuda":
            status = torch.cuda.cudart().cudaHostRegister(area.ctypes.data, area.nbytes, 0)
            if int(status):
                raise ConfigError(
                    f"the device cannot lock {area.nbytes / 2**30:.1f} GiB of main memory (CUDA error {int(status)}): "
                    "lower kv_host_gib",
                    metadata={"field": "kv_host_gib"},
                )

    def unlock_pages(self, area: Bytes) -> None:
        """See DeviceMemory.unlock_pages."""
        if self.device.type == "cuda":
            torch.cuda.cudart().cudaHostUnregister(area.ctypes.data)

    def admit(self, base_address: int, nbytes: int) -> None:
        ends = np.array([base_address]), np.array([nbytes])
        end = base_address + nbytes
        held = any(s.start <= base_address and end <= s.end for s in self._spans)
        if nbytes <= 0 or not (held or self._host.covers(*ends)):
            raise ConfigError(
                f"{nbytes} bytes at {base_address:#x} are not in the KV memory of {self.device}"
            )

    def allocate(self, nbytes: int) -> Bytes:
        pinned = self.device.type == "cuda"
        area: Bytes = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned).numpy()
        return area

    def gather(self, addresses: Int64Array, lengths: Int64Array, target: Bytes) -> None:
        if self._host.spans and self._host.covers(addresses, lengths):
            gather(addresses, lengths, target)
            return
        self.to_host([Piece(addresses, lengths, target)])

    def scatter(self, source: Bytes, addresses: Int64Array, lengths: Int64Array) -> None:
        self.to_device([Piece(addresses, lengths, source)])

    def word_sum(self, addresses: Int64Array, lengths: Int64Array, seed: int) -> int:
        if self._host.spans and self._host.covers(addresses, lengths):
            return HOST_MEMORY.word_sum(addresses, lengths, seed)
        way = self._gathering
        with way.copying():
            total = torch.zeros((), dtype=torch.int64, device=self.device)
            for start, packed in self._queue_packed(way, addresses, lengths):
                for words in packed.view(torch.int32).split(self._limits.buffer_bytes // 4):
                    total += _weighted(words, start // 4, seed)
                    start += 4 * len(words)  # noqa: PLW2901
        return int(total.item()) % 2**64

    def to_host(self, pieces: Iterable[Piece], mark: Mark = PASSED) -> None:
        """See DeviceMemory.to_host."""
        way = self._gathering
        with way.copying(mark):
            for addresses, lengths, area in pieces:
                self._queue_gather(way, addresses, lengths, torch.from_numpy(area))

    def to_device(self, pieces: Iterable[Piece], mark: Mark = PASSED) -> None:
        """See DeviceMemory.to_device."""
        way = self._scattering
        with way.copying(mark):
            for addresses, lengths, area in pieces:
                self._queue_scatter(way, addresses, lengths, torch.from_numpy(area))

    def _queue_gather(
        self, way: _Direction, addresses: Int64Array, lengths: Int64Array, host: Tensor
    ) -> None:
        for start, packed in self._queue_packed(way, addresses, lengths):
            host[start : start + len(packed)].copy_(packed, non_blocking=True)

    def _queue_packed(
        self, way: _Direction, addresses: Int64Array, lengths: Int64Array
    ) -> Iterator[tuple[int, Tensor]]:
        """The bytes of the runs on the device, in parts, and where each part begins. A part ends with the next one."""
        spans = self._spans
        for part in self._batches(spans, addresses, lengths):
            if part.direct:
                packed = _run(spans, part.segments[0])
            else:
                packed = way.buffer[: part.stop - part.start]
                for segment in part.segments:
                    offset = segment.packed_offset - part.start
                    rows = rows_of(segment, offset)
                    words = spans[segment.span].words(rows)
                    index = self._upload(rows.index)
                    torch.index_select(words, 0, index, out=way.packed(offset, rows))
            yield part.start, packed

    def _queue_scatter(
        self, way: _Direction, addresses: Int64Array, lengths: Int64Array, host: Tensor
    ) -> None:
        spans = self._spans
        for part in self._batches(spans, addresses, lengths):
            if part.direct:
                run = _run(spans, part.segments[0])
                run.copy_(host[part.start : part.stop], non_blocking=True)
                continue
            packed = way.buffer[: part.stop - part.start]
            packed.copy_(host[part.start : part.stop], non_blocking=True)
            for segment in part.segments:
                offset = segment.packed_offset - part.start
                rows = rows_of(segment, offset)
                words = spans[segment.span].words(rows)
                words.index_copy_(0, self._upload(rows.index), way.packed(offset, rows))

    def _batches(
        self, spans: tuple[_Span, ...], addresses: Int64Array, lengths: Int64Array
    ) -> Iterator[Batch]:
        edges = [(span.start, span.end) for span in spans]
        limits = self._limits
        return batch(cut(edges, addresses, lengths), limits.buffer_bytes, limits.direct_bytes)

    def _upload(self, index: Int64Array) -> Tensor:
        words = torch.from_numpy(index)
        if self.device.type == "cuda":
            # From other memory, the call would wait for all that the stream has to do before.
            words = words.pin_memory()
        return words.to(self.device, non_blocking=True)


def _weighted(words: Tensor, first_word: int, seed: int) -> Tensor:
    """The part of a word sum. Products of 64-bit integers wrap, also on devices."""
    numbers = torch.arange(first_word, first_word + len(words), device=words.device)
    weights = (numbers * (WORD_FACTOR - 2**64) + (seed - (seed >> 63 << 64))) | 1
    return ((words.to(torch.int64) & 0xFFFF_FFFF) * weights).sum()


def _run(spans: tuple[_Span, ...], segment: Segment) -> Tensor:
    first = int(segment.offsets[0])
    return spans[segment.span].data[first : first + segment.length]


_log = logging.getLogger(__name__)


def open_tensor_transport(
    tensor: Tensor,
    kind: str,
    host: str,
    *,
    gpu_direct: bool = True,
    rdma_devices: Sequence[str] = (),
    admitted: Networks | None = None,
    quiet_s: float = write_quiet_s(),
) -> tuple[KvTransport, DeviceOrder]:
    """A transport of `kind` that has registered the tensor's whole allocation, and its order. See open_transport.

    KV on a device crosses host memory on both sides, unless `gpu_direct` is set and an RDMA adapter reaches the device.
    Raises ConfigError as open_transport and register do.
    """
    open_one = partial(
        open_transport, kind, host, rdma_devices=rdma_devices, admitted=admitted, quiet_s=quiet_s
    )
    if tensor.device.type == "cpu":
        storage = tensor.untyped_storage()
        transport = open_one()
        transport.register(storage.data_ptr(), storage.nbytes())
        return transport, open_order(tensor.device, transport.memory)
    if gpu_direct and kind == "mooncake":
        opened = _open_direct(tensor, open_one)
        if opened is not None:
            return opened
    memory = TorchMemory(tensor.device)
    address, nbytes = memory.hold(tensor)
    transport = open_one(memory=memory)
    transport.register(address, nbytes)
    return transport, open_order(tensor.device, memory)


def _open_direct(
    tensor: Tensor, open_one: Callable[..., KvTransport]
) -> tuple[KvTransport, DeviceOrder] | None:
    """A transport without host memory in between. None where that is not possible, which only trying shows."""
    transport: KvTransport | None = None
    try:
        memory = TorchMemory(tensor.device, direct=True)
        order = open_order(tensor.device, memory)
        address, nbytes = memory.hold(tensor)
        transport = open_one(protocol="rdma", memory=memory)
        transport.register(address, nbytes)
        # Mooncake registers the memory with the adapter when it makes the session.
        transport.session  # noqa: B018
    except ConfigError as error:
        _log.info("KV bytes of %s cross host memory: %s", tensor.device, error)
        if transport is not None:
            transport.close()
        return None
    _log.info("adapters read and write the memory of %s", tensor.device)
    return transport, order


def open_tier_memory(tensor: Tensor) -> DeviceMemory:
    """For copies to lower tiers. A device has streams of its own for them, so that no transfer waits for them.

    Raises ConfigError as TorchMemory.hold does.
    """
    if tensor.device.type == "cpu":
        return ADDRESSED_MEMORY
    memory = TorchMemory(tensor.device)
    memory.hold(tensor)
    return memory


def register_host(transport: KvTransport, base_address: int, nbytes: int) -> None:
    """Lets a transport send from main memory as well. Raises ConfigError as KvTransport.register does."""
    if isinstance(transport.memory, TorchMemory):
        transport.memory.hold_host(base_address, nbytes)
    transport.register(base_address, nbytes)
