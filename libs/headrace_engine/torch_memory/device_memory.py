"""Device tensors as the memory that runs are copied from and to."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace_common.errors import ConfigError
from headrace_engine.torch_memory.segments import Batch, Rows, Segment, batch, cut, rows_of
from headrace_engine.torch_memory.streams import open_copy_stream
from headrace_kv.plan.runs import Int64Array
from headrace_kv.transport.memory import Bytes

_COPY_TIMEOUT_S = 10.0
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
    def copying(self) -> Iterator[None]:
        """At the end, also after an error, waits for all work queued inside. Raises TransferFailed."""
        with self._lock, self._stream.use():
            try:
                yield
            finally:
                self._stream.drain(_COPY_TIMEOUT_S)

    def packed(self, offset: int, rows: Rows) -> Tensor:
        """Part of the buffer, shape [run, word]."""
        stop = offset + len(rows.index) * rows.words * rows.word_bytes
        return self.buffer[offset:stop].view(_WORDS[rows.word_bytes]).view(-1, rows.words)


class TorchMemory:
    """Memory of one device, see transport.memory.Memory. Its copies go through page-locked host memory.

    With `direct`, transports read and write it themselves, and copies are only for peers that they do not reach.
    A caller of `gather` ensures that the bytes are written, a caller of `scatter` that no kernel reads them any more.
    """

    on_host = False

    def __init__(
        self, device: torch.device, limits: CopyLimits | None = None, *, direct: bool = False
    ) -> None:
        self.device = device
        self.staged = not direct
        self._limits = limits or CopyLimits()
        self._spans: tuple[_Span, ...] = ()
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
        end = base_address + nbytes
        if nbytes <= 0 or not any(s.start <= base_address and end <= s.end for s in self._spans):
            raise ConfigError(
                f"{nbytes} bytes at {base_address:#x} are not in the KV memory of {self.device}"
            )

    def allocate(self, nbytes: int) -> Bytes:
        pinned = self.device.type == "cuda"
        area: Bytes = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned).numpy()
        return area

    def gather(self, addresses: Int64Array, lengths: Int64Array, target: Bytes) -> None:
        spans, host, way = self._spans, torch.from_numpy(target), self._gathering
        with way.copying():
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
                host[part.start : part.stop].copy_(packed, non_blocking=True)

    def scatter(self, source: Bytes, addresses: Int64Array, lengths: Int64Array) -> None:
        spans, host, way = self._spans, torch.from_numpy(source), self._scattering
        with way.copying():
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
        return torch.from_numpy(index).to(self.device)


def _run(spans: tuple[_Span, ...], segment: Segment) -> Tensor:
    first = int(segment.offsets[0])
    return spans[segment.span].data[first : first + segment.length]
