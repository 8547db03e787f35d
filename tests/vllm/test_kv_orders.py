"""KV caches in every order that vLLM's GPU backends may choose, made by vLLM's own code in CPU memory."""

from __future__ import annotations

import ctypes
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from headrace_engine.connector.layer_groups import LayerGroup
from headrace_engine.vllm.rank.memory import Arena, describe_arena, rank_memory
from headrace_kv.copy_plan import BlockSpan, CopyPlanner
from headrace_kv.layout import TOKEN_OUTER, TOKENS
from headrace_kv.shard_map import Edge
from tests.vllm.conftest import IMPORTS_VLLM

if TYPE_CHECKING:
    from torch import Tensor

pytestmark = IMPORTS_VLLM

LAYERS, BLOCKS, HEADS, HEAD_SIZE, BLOCK_TOKENS = 3, 6, 2, 8, 16
ORDERS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")


class Cache:
    """All layers in one allocation, as allocate_kv_cache makes it on a device."""

    def __init__(self, order: str, block_tokens: int = BLOCK_TOKENS) -> None:
        import torch
        from vllm.v1.kv_cache_interface import (
            FullAttentionSpec,
            KVCacheTensor,
            compute_layout_strides,
            create_kv_cache_views,
        )
        from vllm.v1.kv_cache_layout import KVCacheLayout

        spec = FullAttentionSpec(
            block_size=block_tokens,
            num_kv_heads=HEADS,
            head_size=HEAD_SIZE,
            dtype=torch.bfloat16,
        )
        layout = KVCacheLayout[order]
        names = [f"model.layers.{number}.attn" for number in range(LAYERS)]
        strides = compute_layout_strides(spec, BLOCKS, LAYERS, layout)
        placed = KVCacheTensor(
            size=LAYERS * BLOCKS * spec.page_size_bytes,
            layers=names,
            layer_stride=strides[0],
            block_stride=strides[1],
            offset=0,
        )
        self.raw = torch.zeros(placed.size, dtype=torch.int8)
        views = create_kv_cache_views(self.raw, spec, BLOCKS, layout, placed)
        self.tensors: dict[str, Tensor] = dict(zip(names, views, strict=True))
        self.arena: Arena = describe_arena(
            self.tensors,
            [
                LayerGroup(
                    index=0,
                    name="attention",
                    kind=TOKENS,
                    head_count=HEADS,
                    block_tokens=block_tokens,
                    block_format="",
                    layers=tuple(enumerate(names)),
                )
            ],
            rank=0,
            tensor_parallel_size=1,
            block_format_of=lambda tensor, tokens: TOKEN_OUTER,
        )

    def tokens(self, layer: int, blocks: list[int]) -> Any:
        """Shape [heads, tokens of the blocks, channels]."""
        view = list(self.tensors.values())[layer][blocks]
        return view.transpose(0, 1).flatten(1, 2)


@pytest.mark.parametrize(("first", "second"), [*pairwise(ORDERS), (ORDERS[1], ORDERS[0])])
def test_tokens_cross_between_any_two_orders(first: str, second: str) -> None:
    check_crossing(Cache(first), Cache(second), [4, 1, 5], [2, 3, 0])


@pytest.mark.parametrize("order", ORDERS)
def test_tokens_cross_between_blocks_of_different_sizes(order: str) -> None:
    larger = Cache(order, 2 * BLOCK_TOKENS)
    check_crossing(Cache(order), larger, [4, 1, 5], [2, 0])
    check_crossing(larger, Cache(ORDERS[0]), [4, 1], [2, 3, 0])


def check_crossing(
    source: Cache, target: Cache, source_blocks: list[int], target_blocks: list[int]
) -> None:
    """Copies tokens between these blocks by the planner's runs. They arrive in their places, and nothing else does."""
    import torch

    source.raw.copy_(torch.from_numpy(np.random.default_rng(1).integers(0, 100, len(source.raw))))
    target.raw.zero_()
    memories = [
        rank_memory(cache.arena, rank=0, transport="in_memory", session="s")
        for cache in (source, target)
    ]
    planner = CopyPlanner(*memories)
    start, end = 5, 43
    span = BlockSpan(start, end, np.array(source_blocks), 0, np.array(target_blocks), 0)
    for layer in range(LAYERS):
        runs = planner.plan(Edge(0, 0, 0, 0, HEADS), layer, span)
        for source_address, target_address, length in zip(
            runs.source_addresses.tolist(),
            runs.destination_addresses.tolist(),
            runs.lengths.tolist(),
            strict=True,
        ):
            ctypes.memmove(target_address, source_address, length)
    for layer in range(LAYERS):
        sent, got = source.tokens(layer, source_blocks), target.tokens(layer, target_blocks)
        assert torch.equal(
            got[:, start:end].view(torch.int16), sent[:, start:end].view(torch.int16)
        )
        assert not got[:, :start].any()
        assert not got[:, end:].any()


def test_a_block_of_a_head_is_one_run_in_the_order_that_the_connector_requires() -> None:
    from headrace_engine.vllm.connector import HeadraceConnector

    class Model:
        def __init__(self, latent: bool) -> None:
            self.model_config = type("ModelConfig", (), {"use_mla": latent})()

    order = HeadraceConnector.get_required_kvcache_layout(Model(latent=False))
    assert order == "LBHNC"
    assert HeadraceConnector.get_required_kvcache_layout(Model(latent=True)) is None
    cache = Cache("LBHNC")
    memory = rank_memory(cache.arena, rank=0, transport="in_memory", session="s")
    span = BlockSpan(0, 2 * BLOCK_TOKENS, np.array([4, 1]), 0, np.array([2, 5]), 0)
    one_head = CopyPlanner(memory, memory).plan(Edge(0, 0, 1, 1, 1), 0, span)
    assert one_head.lengths.tolist() == [BLOCK_TOKENS * 2 * HEAD_SIZE * 2] * 2
    whole = CopyPlanner(memory, memory).plan(Edge(0, 0, 0, 0, HEADS), 0, span)
    assert len(whole) == 2
