"""KV tensors as regions, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from headrace_common.errors import ConfigError
from headrace_engine.connector.layer_groups import LayerGroup, StatePart
from headrace_engine.vllm.rank.memory import WHOLE_BLOCKS, Arena, describe_arena, rank_memory
from headrace_kv.layout import STATE, TOKEN_OUTER, TOKENS, GroupKind, KvLayout, Part

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


def group(
    kind: GroupKind, names: Sequence[str], *, index: int = 0, block_tokens: int = 32, **changes: Any
) -> LayerGroup:
    values: dict[str, Any] = {
        "index": index,
        "name": f"group.{index}",
        "kind": kind,
        "head_count": 3,
        "block_tokens": block_tokens,
        "block_format": "",
        "layers": tuple((int(name[1:]), name) for name in names),
    }
    return LayerGroup(**(values | changes))


def describe(
    *tensors: FakeTensor,
    groups: Sequence[LayerGroup] = (),
    rank: int = 0,
    ranks: int = 1,
    block_format: str = "packed-{}",
) -> Arena:
    caches: dict[str, Any] = {f"l{number}": item for number, item in enumerate(tensors)}
    return describe_arena(
        caches,
        groups or [group(TOKENS, list(caches))],
        rank=rank,
        tensor_parallel_size=ranks,
        block_format_of=lambda cache, block_tokens: block_format.format(block_tokens),
    )


def test_regions_match_the_addresses_of_the_tensors() -> None:
    groups = [group(TOKENS, ("l0", "l1"), head_count=6)]
    arena = describe(tensor(0), tensor(1), groups=groups, rank=1, ranks=2)
    assert (arena.base_address, arena.arena_bytes) == (BASE, 1 << 20)
    assert [region.offset_bytes for region in arena.regions] == [0, 8 * 3 * 4096 * 4]
    region = arena.regions[1]
    assert (region.layer, region.block_stride_bytes) == (1, 3 * 4096 * 4)
    assert (region.head_stride_bytes, region.unit_bytes) == (4096 * 4, 32 * 128 * 4)
    layout = KvLayout("m:1", 2, arena.groups)
    assert (layout.dtype, layout.layer_count, layout.block_tokens) == ("float32", 2, 32)
    assert layout.groups[0].parts == (Part("kv", "float32", region.unit_bytes, "packed-32"),)
    memory = rank_memory(arena, rank=1, transport="mooncake", session="h:1")
    assert (memory.rank, memory.regions) == (1, arena.regions)


def test_tokens_of_latent_attention_are_stored_separately() -> None:
    latent = tensor(0, shape=(8, 1, 16, 576), strides=(9216, 9216, 576, 1))
    groups = [group(TOKENS, ("l0",), head_count=1, block_tokens=16, block_format=TOKEN_OUTER)]
    arena = describe(latent, groups=groups, rank=1, ranks=2)
    assert arena.groups[0].token_addressable
    assert (arena.regions[0].unit_bytes, arena.regions[0].token_stride_bytes) == (2304, 2304)


@pytest.mark.parametrize(
    "odd",
    [
        {"shape": (8, 3, 16, 128)},
        {"base": BASE * 2},
        {"shape": (9, 3, 32, 128)},
        {"strides": (3 * 4096, 4096, 1, 32)},
        {"shape": (8, 1, 4096), "strides": (4096, 4096, 1)},
        {"dtype": "torch.bfloat16"},
        {"shape": (8, 2, 32, 128)},
    ],
)
def test_different_caches_are_refused(odd: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        describe(tensor(0), tensor(1, **odd))


def test_blocks_are_sent_whole_when_the_model_has_states() -> None:
    page = tensor(1, shape=(8, 1, 1, 1000), strides=(12288, 12288, 1000, 1))
    groups = [
        group(TOKENS, ("l0",)),
        group(STATE, ("l1",), index=1, head_count=1, block_format="pages"),
    ]

    arena = describe(tensor(0), page, groups=groups, block_format=TOKEN_OUTER)
    assert arena.groups[0].parts == (Part("kv", "float32", 32 * 512, WHOLE_BLOCKS),)
    assert arena.regions[0].token_stride_bytes == 0
    token_first = tensor(0, strides=(3 * 4096, 128, 3 * 128, 1))
    with pytest.raises(ConfigError, match="VLLM_KV_CACHE_LAYOUT=HND"):
        describe(token_first, page, groups=groups, block_format=TOKEN_OUTER)


def test_kernels_that_split_blocks_name_the_size_to_set() -> None:
    with pytest.raises(ConfigError, match="set block_size to 16") as caught:
        describe(tensor(0, shape=(16, 3, 16, 128), strides=(3 * 2048, 2048, 128, 1)))
    assert caught.value.metadata["field"] == "block_size"


def test_a_state_with_heads_has_a_region_for_each_part() -> None:
    parts = (StatePart("input.0", "float32", 0, 32), StatePart("recurrent", "float32", 128, 64))
    states = group(STATE, ["a0", "a1"], head_count=8, state_parts=parts, block_format="s")
    # Pages of 96 elements have the 4 heads of a rank of two, and some bytes that nothing uses.
    caches = {
        name: tensor(0, shape=(8, 1, 1, 100), strides=(100, 100, 100, 1), offset=offset)
        for name, offset in (("a0", 0), ("a1", 4096))
    }
    arena = describe_arena(
        caches,
        [states],
        rank=1,
        tensor_parallel_size=2,
        block_format_of=lambda tensor, block_size: "",
    )
    (found,) = arena.groups
    assert (found.head_count, found.block_tokens) == (8, 0)
    assert [(part.name, part.unit_bytes, part.block_format) for part in found.parts] == [
        ("input.0", 32, "s"),
        ("recurrent", 64, "s"),
    ]
    assert [
        (one.layer, one.part, one.offset_bytes, one.head_count, one.head_stride_bytes)
        for one in arena.regions
    ] == [
        (0, "input.0", 0, 4, 32),
        (0, "recurrent", 128, 4, 64),
        (1, "input.0", 4096, 4, 32),
        (1, "recurrent", 4096 + 128, 4, 64),
    ]
    assert {one.block_stride_bytes for one in arena.regions} == {400}
    with pytest.raises(ConfigError, match="cannot transfer"):
        describe_arena(
            caches,
            [replace(states, state_parts=(StatePart("input.0", "float32", 0, 128),))],
            rank=1,
            tensor_parallel_size=2,
            block_format_of=lambda tensor, block_size: "",
        )
