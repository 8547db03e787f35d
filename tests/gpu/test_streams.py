"""Copies and marks beside the computation. Overlap is asserted on a device only."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from headrace_common.errors import TransferFailed
from headrace_kv.transport.memory import Bytes, Mark, Piece, wait_for

if TYPE_CHECKING:
    from headrace_engine.torch_memory.device_memory import TorchMemory
    from headrace_engine.torch_memory.stream_order import CopyStream

LAYERS = 6
LAYER_BYTES = 1 << 20
# About a tenth of a second on devices of 2026.
BUSY_CYCLES = 150_000_000


def keep_busy(device: str) -> None:
    """Keeps the current stream busy for a while."""
    import torch

    if device != "cpu":
        torch.cuda._sleep(BUSY_CYCLES)


class Cache:
    """One tensor with a row per layer."""

    def __init__(self, device: str) -> None:
        import torch

        from headrace_engine.torch_memory.device_memory import TorchMemory

        self.memory: TorchMemory = TorchMemory(torch.device(device))
        self.layers = torch.zeros((LAYERS, LAYER_BYTES), dtype=torch.uint8, device=device)
        self.address = self.memory.hold(self.layers)[0]
        self.area = self.memory.allocate(LAYER_BYTES)
        if device != "cpu":
            # The first launch of a kernel may wait for the device.
            torch.cuda._sleep(1)
            self.layers.fill_(0)
            torch.cuda.synchronize()

    def gather(self, layer: int) -> Bytes:
        """The layer's bytes, in runs of 4 KiB from last to first."""
        starts = np.arange(LAYER_BYTES - 4096, -1, -4096, dtype=np.int64)
        addresses = self.address + layer * LAYER_BYTES + starts
        self.memory.gather(addresses, np.full(len(starts), 4096, np.int64), self.area)
        return self.area


def test_layers_are_gathered_as_they_are_written_while_later_ones_are_computed(device: str) -> None:
    import torch

    from headrace_engine.torch_memory.stream_order import mark_compute

    cache = Cache(device)
    cache.gather(0)
    marks: list[Mark] = []
    start_s = time.monotonic()
    for layer in range(LAYERS):
        keep_busy(device)
        cache.layers[layer].fill_(layer + 1)
        marks.append(mark_compute(torch.device(device)))
    queued_s = time.monotonic() - start_s
    beside = []
    for layer, mark in enumerate(marks):
        assert wait_for(mark, 20.0)
        assert bool((cache.gather(layer) == layer + 1).all())
        beside.append(not marks[-1].query())
    if device != "cpu":
        # The forward pass only queued. All layers but the last were gathered while the next one was computed.
        assert queued_s < 0.1
        assert beside[0]
        assert sum(beside) >= LAYERS - 2


def test_copies_run_beside_the_computation(device: str) -> None:
    import torch

    from headrace_engine.torch_memory.stream_order import mark_compute

    cache = Cache(device)
    cache.layers[0].fill_(1)
    cache.gather(0)
    if device != "cpu":
        torch.cuda.synchronize()
    keep_busy(device)
    mark = mark_compute(torch.device(device))
    assert (cache.gather(0) == 1).all()
    addresses, lengths = np.array([cache.address + LAYER_BYTES]), np.array([LAYER_BYTES])
    cache.memory.scatter(cache.area, addresses, lengths)
    assert mark.query() is (device == "cpu")
    assert bool((cache.layers[1].cpu() == 1).all())


def test_host_areas_are_page_locked(device: str) -> None:
    import torch

    area = torch.from_numpy(Cache(device).area)
    assert area.is_pinned() is (device != "cpu")


class Stuck:
    """A mark that is passed when the test says so."""

    def __init__(self) -> None:
        self.answers: list[bool | RuntimeError] = []

    def query(self) -> bool:
        answer = self.answers.pop(0) if self.answers else False
        if isinstance(answer, RuntimeError):
            raise answer
        return answer


def drained(mark: Stuck, wait_on_device: Callable[[Mark], None] | None = None) -> CopyStream:
    pytest.importorskip("torch")
    from headrace_engine.torch_memory.stream_order import CopyStream

    return CopyStream(contextlib.nullcontext, lambda: mark, wait_on_device)


@pytest.mark.vllm
def test_a_device_waits_for_marks_in_its_own_queue() -> None:
    waited: list[Mark] = []
    never = Stuck()
    drained(Stuck(), waited.append).wait(never, 0.0)
    assert waited == [never]
    with pytest.raises(TransferFailed, match=r"did not compute within 0\.02 s"):
        drained(Stuck()).wait(never, 0.02)


@pytest.mark.vllm
def test_a_device_that_does_not_copy_in_time_is_lost() -> None:
    mark = Stuck()
    stream = drained(mark)
    mark.answers = [False, False, True]
    stream.drain(5.0)
    with pytest.raises(TransferFailed, match=r"within 0\.02 s"):
        stream.drain(0.02)
    mark.answers = [True]
    with pytest.raises(TransferFailed, match="stopped copying"):
        stream.drain(5.0)


@pytest.mark.vllm
def test_a_device_that_fails_is_lost() -> None:
    mark = Stuck()
    stream = drained(mark)
    mark.answers = [RuntimeError("unspecified launch failure"), True]
    with pytest.raises(TransferFailed, match="launch failure"):
        stream.drain(5.0)
    with pytest.raises(TransferFailed, match="stopped copying"):
        stream.drain(5.0)


class LateStream:
    """A stream that runs nothing before it is drained, as a busy device may do; works on the CPU's tensors."""

    def __init__(self) -> None:
        self.queued: list[Callable[[], object]] = []
        self.waited: list[Mark] = []
        self.before_drain: Callable[[], None] = lambda: None

    def use(self) -> contextlib.AbstractContextManager[Any]:
        from torch.utils._python_dispatch import TorchDispatchMode

        queued = self.queued

        class Late(TorchDispatchMode):  # type: ignore[misc]  # torch is Any
            def __torch_dispatch__(
                self, function: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                name, kwargs = str(function), kwargs or {}
                if name in {"aten.copy_.default", "aten.index_copy_.default"}:
                    queued.append(lambda: function(*args, **kwargs))
                    return args[0]
                if name == "aten.index_select.out":
                    queued.append(lambda: function(*args, **kwargs))
                    return kwargs["out"]
                assert function.is_view or name.startswith("aten.empty"), f"{name} ran early"
                return function(*args, **kwargs)

        return Late()

    def wait(self, mark: Mark, timeout_s: float) -> None:
        self.waited.append(mark)
        assert not self.queued

    def drain(self, timeout_s: float) -> None:
        from torch.utils._python_dispatch import _disable_current_modes

        self.before_drain()
        with _disable_current_modes():
            for run in self.queued:
                run()
        self.queued.clear()


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[LateStream]:
    """Those of the memory that the test opens: for gathering, and for scattering."""
    pytest.importorskip("torch")
    from headrace_engine.torch_memory import device_memory

    opened: list[LateStream] = []

    def open_late(device: object) -> LateStream:
        opened.append(LateStream())
        return opened[-1]

    monkeypatch.setattr(device_memory, "open_copy_stream", open_late)
    return opened


@pytest.mark.vllm
def test_all_pieces_of_a_copy_wait_for_one_mark_and_one_drain(streams: list[LateStream]) -> None:
    import torch

    from headrace_engine.torch_memory.device_memory import TorchMemory

    memory = TorchMemory(torch.device("cpu"))
    data = torch.arange(200, dtype=torch.uint8)
    address, _ = memory.hold(data)
    areas = [np.zeros(32, np.uint8) for _ in range(2)]
    lengths = np.full(2, 16, np.int64)
    pieces = [
        Piece(address + np.array([start, start + 24]), lengths, area)
        for start, area in zip((8, 104), areas, strict=True)
    ]
    drains: list[int] = []
    streams[0].before_drain = lambda: drains.append(len(streams[0].queued))
    streams[1].before_drain = lambda: drains.append(len(streams[1].queued))
    marks = [Stuck(), Stuck()]
    memory.to_host(pieces, marks[0])
    assert [area.tolist() for area in areas] == [
        [*range(8, 24), *range(32, 48)],
        [*range(104, 120), *range(128, 144)],
    ]
    data.zero_()
    memory.to_device(pieces, marks[1])
    assert sorted(set(data.tolist()) - {0}) == sorted(np.concatenate(areas).tolist())
    assert drains == [4, 4]
    assert [stream.waited for stream in streams] == [[marks[0]], [marks[1]]]


@pytest.mark.vllm
def test_copies_may_all_run_as_late_as_the_drain(streams: list[LateStream]) -> None:
    import torch

    from headrace_engine.torch_memory import device_memory

    limits = device_memory.CopyLimits(buffer_bytes=256, direct_bytes=100)
    memory = device_memory.TorchMemory(torch.device("cpu"), limits)
    random = np.random.default_rng(1)
    content = random.integers(1, 256, 40_000, np.uint8)
    data = torch.from_numpy(content.copy())
    address, nbytes = memory.hold(data)
    lengths = np.array([8] * 100 + [96] * 20 + [1000] * 3, np.int64)
    offsets = np.cumsum(lengths + 16) - lengths - 16
    area = np.zeros(int(lengths.sum()), np.uint8)

    def untouched() -> None:
        assert len(streams[0].queued) > 20
        assert not area.any()

    streams[0].before_drain = untouched
    memory.gather(address + offsets, lengths, area)
    slices = [content[o : o + n] for o, n in zip(offsets.tolist(), lengths.tolist(), strict=True)]
    assert np.array_equal(area, np.concatenate(slices))
    data.zero_()
    memory.scatter(area, address + offsets, lengths)
    expected = np.zeros(nbytes, np.uint8)
    for offset, length in zip(offsets.tolist(), lengths.tolist(), strict=True):
        expected[offset : offset + length] = content[offset : offset + length]
    assert np.array_equal(data.numpy(), expected)
