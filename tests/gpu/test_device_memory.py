"""Gathering from tensors and scattering to them, against plain slices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace_common.errors import ConfigError, TransferFailed
from headrace_kv.transport.memory import HOST_MEMORY, Bytes

if TYPE_CHECKING:
    from headrace_engine.torch_memory.device_memory import TorchMemory

SIZE = 72_000


class Place:
    """Three tensors on one device. Runs stay within one of them."""

    def __init__(self, device: str) -> None:
        import torch

        from headrace_engine.torch_memory.device_memory import CopyLimits, TorchMemory

        self.memory: TorchMemory = TorchMemory(
            torch.device(device), CopyLimits(buffer_bytes=256, direct_bytes=100)
        )
        self._tensors = [
            torch.zeros(SIZE, dtype=torch.uint8, device=device),
            torch.zeros((SIZE // 8, 2), dtype=torch.float32, device=device),
            torch.zeros(SIZE // 2, dtype=torch.bfloat16, device=device)[10:],
        ]
        self.starts = [self.memory.hold(tensor)[0] for tensor in self._tensors]
        self.fill([np.zeros(SIZE, np.uint8)] * 3)

    def _bytes(self, number: int) -> Any:
        import torch

        storage = self._tensors[number].untyped_storage()
        data = torch.empty(0, dtype=torch.uint8, device=self._tensors[number].device)
        return data.set_(storage)

    def fill(self, contents: list[Bytes]) -> None:
        import torch

        for number, content in enumerate(contents):
            self._bytes(number).copy_(torch.from_numpy(content))
        if self.memory.device.type == "cuda":
            torch.cuda.synchronize()

    def contents(self) -> list[Bytes]:
        return [self._bytes(number).cpu().numpy().copy() for number in range(3)]


@pytest.fixture(scope="module")
def place(device: str) -> Place:
    return Place(device)


@st.composite
def runs(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """(tensor, offset, length) of runs that do not overlap, in any order."""
    align = draw(st.sampled_from([1, 2, 8, 64]))
    units = draw(st.lists(st.sampled_from([0, 1, 3, 8, 8, 8, 20]), min_size=1, max_size=40))
    found, positions = [], [0, 0, 0]
    for unit in units:
        tensor, gap = draw(st.integers(0, 2)), draw(st.sampled_from([0, 0, 1, 5]))
        found.append((tensor, positions[tensor] + gap * align, unit * align))
        positions[tensor] += (gap + unit) * align
    if draw(st.booleans()):
        found.sort(key=lambda run: run[2])
    return list(draw(st.permutations(found))) if draw(st.booleans()) else found


@settings(max_examples=150, deadline=None)
@given(runs())
def test_gather_then_scatter(place: Place, found: list[tuple[int, int, int]]) -> None:
    random = np.random.default_rng(3)
    contents = [random.integers(1, 256, SIZE, np.uint8) for _ in range(3)]
    place.fill(contents)
    addresses = np.array([place.starts[tensor] + offset for tensor, offset, _ in found], np.int64)
    lengths = np.array([length for _, _, length in found], np.int64)
    total = int(lengths.sum())
    area = place.memory.allocate(total + 10)
    area[:] = 0
    place.memory.gather(addresses, lengths, area)
    slices = [contents[tensor][offset : offset + length] for tensor, offset, length in found]
    assert np.array_equal(area[:total], np.concatenate(slices))
    assert not area[total:].any()

    area[:total] = random.integers(1, 256, total, np.uint8)
    position = 0
    for tensor, offset, length in found:
        contents[tensor][offset : offset + length] = area[position : position + length]
        position += length
    place.memory.scatter(area, addresses, lengths)
    for expected, actual in zip(contents, place.contents(), strict=True):
        assert np.array_equal(expected, actual)


@settings(max_examples=100, deadline=None)
@given(runs(), st.sampled_from([0, 1, 2**64 - 1]))
def test_word_sums_are_those_of_a_processor(
    place: Place, found: list[tuple[int, int, int]], seed: int
) -> None:
    random = np.random.default_rng(5)
    contents = [random.integers(0, 256, SIZE, np.uint8) for _ in range(3)]
    place.fill(contents)
    addresses = np.array([place.starts[tensor] + 4 * offset for tensor, offset, _ in found])
    lengths = np.array([4 * length for _, _, length in found])
    slices = [contents[one][4 * at : 4 * (at + length)] for one, at, length in found]
    packed = np.concatenate(slices)
    whole = np.array([packed.ctypes.data]), np.array([len(packed)])
    expected = HOST_MEMORY.word_sum(*whole, seed)
    assert place.memory.word_sum(addresses, lengths, seed) == expected


def test_main_memory_is_read_and_never_written(place: Place) -> None:
    host = np.arange(200, dtype=np.uint8)
    base = int(host.ctypes.data)
    with pytest.raises(ConfigError):
        place.memory.admit(base, host.nbytes)
    place.memory.hold_host(base, host.nbytes)
    place.memory.admit(base, host.nbytes)
    addresses, lengths = base + np.array([150, 3]), np.array([20, 10])
    area = place.memory.allocate(30)
    place.memory.gather(addresses, lengths, area)
    assert area.tolist() == [*range(150, 170), *range(3, 13)]
    with pytest.raises(TransferFailed):
        place.memory.scatter(area, addresses, lengths)
    with pytest.raises(TransferFailed):
        place.memory.gather(*one(base + 190, 11), area)


def one(address: int, length: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    return np.array([address], np.int64), np.array([length], np.int64)


def test_addresses_outside_the_tensors_are_rejected(place: Place) -> None:
    area = place.memory.allocate(64)
    for start in place.starts:
        for address, length in ((start - 1, 8), (start + SIZE - 7, 8)):
            with pytest.raises(TransferFailed):
                place.memory.gather(*one(address, length), area)
            with pytest.raises(TransferFailed):
                place.memory.scatter(area, *one(address, length))
            with pytest.raises(ConfigError):
                place.memory.admit(address, length)
        place.memory.admit(start, SIZE)
    with pytest.raises(ConfigError):
        place.memory.admit(place.starts[0], 0)


def test_memory_of_another_device_is_rejected(place: Place) -> None:
    import torch

    with pytest.raises(ConfigError, match="meta"):
        place.memory.hold(torch.empty(8, device="meta"))


def test_holding_a_tensor_twice_adds_it_once(place: Place) -> None:
    before = place.starts[0]
    assert place.memory.hold(place._tensors[0]) == (before, SIZE)
