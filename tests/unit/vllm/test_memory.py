"""KV tensors as regions, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from headrace_common.errors import ConfigError
from headrace_engine.vllm.memory import describe_arena, layout_of, rank_memory

BASE = 0x10000


@dataclass
class FakeStorage:
    base: int

    def data_ptr(self) -> int:
        return self.base

    def nbytes(self) -> int:
        return 1 << 20


@dataclass
class FakeTensor:
    """As much of a torch tensor as the module asks for; strides in elements of 4 bytes."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    base: int = BASE
    dtype: str = "torch.float32"

    def untyped_storage(self) -> FakeStorage:
        return FakeStorage(self.base)

    def data_ptr(self) -> int:
        return self.base + self.offset

    def dim(self) -> int:
        return len(self.shape)

    def stride(self, dim: int | None = None) -> Any:
        return self.strides if dim is None else self.strides[dim]

    def element_size(self) -> int:
        return 4


def tensor(layer: int, **changes: Any) -> FakeTensor:
    values: dict[str, Any] = {
        "shape": (8, 3, 32, 128),
        "strides": (3 * 4096, 4096, 128, 1),
        "offset": layer * 8 * 3 * 4096 * 4,
    }
    return FakeTensor(**(values | changes))


def describe(*tensors: FakeTensor) -> Any:
    caches: dict[str, Any] = {f"l{number}": item for number, item in enumerate(tensors)}
    return describe_arena(caches, list(caches))


def test_regions_lie_where_the_tensors_do() -> None:
    arena, shape = describe(tensor(0), tensor(1))
    assert (arena.base_address, arena.arena_bytes, arena.block_count) == (BASE, 1 << 20, 8)
    assert [region.offset_bytes for region in arena.regions] == [0, 8 * 3 * 4096 * 4]
    region = arena.regions[1]
    assert (region.layer, region.block_stride_bytes) == (1, 3 * 4096 * 4)
    assert (region.head_stride_bytes, region.unit_bytes) == (4096 * 4, 32 * 128 * 4)
    layout = layout_of(
        arena,
        shape,
        fingerprint="m:1",
        kv_head_count=6,
        tensor_parallel_size=2,
        interior="vllm-cpu-vec",
    )
    assert (layout.dtype, layout.layer_count, layout.block_tokens) == ("float32", 2, 32)
    assert layout.groups[0].parts[0].unit_bytes == region.unit_bytes
    memory = rank_memory(arena, rank=1, transport="mooncake", session="h:1")
    assert (memory.rank, memory.regions) == (1, arena.regions)


@pytest.mark.parametrize(
    "odd",
    [
        {"shape": (8, 3, 16, 128)},
        {"base": BASE * 2},
        {"shape": (9, 3, 32, 128)},
        {"strides": (3 * 4096, 4096, 1, 32)},
        {"shape": (8, 1, 4096), "strides": (4096, 4096, 1)},
        {"dtype": "torch.bfloat16"},
    ],
)
def test_caches_that_are_not_alike_are_refused(odd: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        describe(tensor(0), tensor(1, **odd))
