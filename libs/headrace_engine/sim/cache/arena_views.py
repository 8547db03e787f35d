"""A rank's placed regions as arrays over its arena. Pure but for the memory that the arrays refer to."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from headrace_common.errors import InternalError
from headrace_engine.sim.model.caches import TOKEN_INNER, SimPart
from headrace_engine.sim.model.model import PartFormula, SimModel, WordArray
from headrace_kv.layout.layout import STATE, CacheGroup, KvLayout, Region
from headrace_kv.plan.shard_map import heads_held


@dataclass(frozen=True, slots=True)
class HeldCache:
    """One rank's part of a cache group, or some layers of it.

    `layer_ids` and `heads` count in the whole model. `views[i]` is part i with shape [layers,
    blocks, heads, tokens, words], where a state has one token. `formulas[i]` gives its content.
    """

    group: int
    is_state: bool
    stage: int
    layer_ids: tuple[int, ...]
    heads: range
    views: tuple[WordArray, ...]
    formulas: tuple[PartFormula, ...]

    def within(self, layers: range) -> HeldCache | None:
        """The same cache with only those layers that are in `layers`; None when there are none."""
        low = bisect_left(self.layer_ids, layers.start)
        high = bisect_left(self.layer_ids, layers.stop)
        if low == high:
            return None
        return replace(
            self,
            layer_ids=self.layer_ids[low:high],
            views=tuple(view[low:high] for view in self.views),
            formulas=tuple(formula.part(slice(low, high)) for formula in self.formulas),
        )


def held_caches(
    layout: KvLayout,
    model: SimModel,
    rank: int,
    regions: Sequence[Region],
    arena: NDArray[np.uint8],
) -> tuple[HeldCache, ...]:
    """A rank's caches, in the order of the groups, without groups that have no layer on its stage."""
    stage, tp_rank = divmod(rank, layout.tensor_parallel_size)
    stage_layers = layout.layers_of(rank)
    placed: dict[tuple[str, int], Region] = {(one.part, one.layer): one for one in regions}
    found: list[HeldCache] = []
    for index, (group, cache) in enumerate(zip(layout.groups, model.caches, strict=True)):
        layer_ids = tuple(layer for layer in group.layers if layer in stage_layers)
        if not layer_ids:
            continue
        first = group.layers.index(layer_ids[0])
        layers = slice(first, first + len(layer_ids))
        heads = heads_held(tp_rank, layout.tensor_parallel_size, group.head_count)
        views = tuple(
            _view([placed[part.name, layer] for layer in layer_ids], group, part, arena)
            for part in cache.parts
        )
        formulas = tuple(
            formula.part(layers, slice(heads.start, heads.stop))
            for formula in model.formulas[index]
        )
        is_state = group.kind == STATE
        found.append(HeldCache(index, is_state, stage, layer_ids, heads, views, formulas))
    return tuple(found)


def _view(
    regions: Sequence[Region], group: CacheGroup, part: SimPart, arena: NDArray[np.uint8]
) -> WordArray:
    """One part's regions, by layer."""
    first = regions[0]
    steps = np.diff([region.offset_bytes for region in regions])
    if len(steps) and (steps != steps[0]).any():
        raise InternalError(f"the layers of part {part.name} are not at equal distances")
    word = part.word.itemsize
    tokens = 1 if group.kind == STATE else group.block_tokens
    token_stride, word_stride = first.token_stride_bytes, word
    if group.kind != STATE and group.parts[0].block_format == TOKEN_INNER:
        token_stride, word_stride = word, tokens * word
    strides = (first.block_stride_bytes, first.head_stride_bytes, token_stride, word_stride)
    return np.ndarray(
        shape=(len(regions), first.block_count, first.head_count, tokens, part.word_count),
        dtype=part.word,
        buffer=arena.data,
        offset=first.offset_bytes,
        strides=(int(steps[0]) if len(steps) else 0, *strides),
    )
