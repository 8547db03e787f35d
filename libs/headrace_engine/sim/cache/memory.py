"""The KV memory of a sim engine's ranks: one arena each, with the configured layout."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from headrace_common.errors import InternalError
from headrace_engine.sim.model.bit_mixer import WORD_MASK, U64Array, mix_int
from headrace_engine.sim.model.model import PartFormula, SimModel, WordArray
from headrace_engine.sim.model.settings import TOKEN_INNER, SimShape, word_of
from headrace_kv.layout import STATE, CacheGroup, KvLayout, Part, RankMemory, Region
from headrace_kv.shard_map import PlacedRegions, heads_held, place_regions
from headrace_kv.transport.memory import allocate_arena, suited_alignment_bytes


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
    regions: Sequence[Region], group: CacheGroup, part: Part, arena: NDArray[np.uint8]
) -> WordArray:
    """One part's regions, by layer."""
    first = regions[0]
    steps = np.diff([region.offset_bytes for region in regions])
    if len(steps) and (steps != steps[0]).any():
        raise InternalError(f"the layers of part {part.name} are not at equal distances")
    word = word_of(part).itemsize
    tokens = 1 if group.kind == STATE else group.block_tokens
    token_stride, word_stride = first.token_stride_bytes, word
    if group.kind != STATE and group.parts[0].block_format == TOKEN_INNER:
        token_stride, word_stride = word, tokens * word
    strides = (first.block_stride_bytes, first.head_stride_bytes, token_stride, word_stride)
    return np.ndarray(
        shape=(len(regions), first.block_count, first.head_count, tokens, part.unit_bytes // word),
        dtype=word_of(part),
        buffer=arena.data,
        offset=first.offset_bytes,
        strides=(int(steps[0]) if len(steps) else 0, *strides),
    )


_GROUP_ALIGNMENT_BYTES = 64
_HEADS_MAX = 1 << 20


class SimMemory:
    """Writes a model's KV and reads it back. Not thread-safe. Transports write into it too.

    Free blocks are filled with a guard word, which differs between memories. Block ids by group are
    in the layout's order. Where the model's setting `verify` is off, its bytes are neither written nor read.
    """

    def __init__(self, model: SimModel, shape: SimShape, guard_seed: int) -> None:
        self._model = model
        self._shape = shape
        self._guard = np.array(mix_int(guard_seed), np.uint64)
        layout = self.layout()
        self.groups = layout.groups
        self._placed = tuple(self._place(layout, rank) for rank in range(layout.rank_count))
        self._arenas = tuple(_new_arena(placed.arena_bytes) for placed in self._placed)
        self._held: tuple[tuple[HeldCache, ...], ...] = tuple(
            held_caches(layout, model, rank, placed.regions, arena)
            for rank, (placed, arena) in enumerate(zip(self._placed, self._arenas, strict=True))
        )
        self._readings = tuple(_readings(self._held))
        # Those of each reading, for as many blocks as a request had until now.
        self._weights = [np.empty((0, 0, 0, 0, 0), np.uint64)] * len(self._readings)
        # The keys are the layers that a step writes at once: one or all.
        self._by_layers: dict[range, tuple[HeldCache, ...]] = {}
        self._verifies = shape.settings.verify
        if not self._verifies:
            for arena in self._arenas:
                # Transfers send them, so they must not be what this process had in that memory.
                arena.fill(0)
            return
        for group, _ in enumerate(self.groups):
            for view in self._views_of(group):
                view[...] = self._guard.astype(view.dtype)

    def layout(self, broadcast_width: int = 1) -> KvLayout:
        """The layout for peers. `broadcast_width` ranks copy equal bytes to each other."""
        return KvLayout(
            model=self._model.name(),
            tensor_parallel_size=self._shape.tensor_parallel_size,
            groups=self._shape.groups,
            stage_starts=self._shape.stage_starts,
            broadcast_width=broadcast_width,
        )

    def _place(self, layout: KvLayout, rank: int) -> PlacedRegions:
        shape = self._shape
        return place_regions(
            layout, rank, shape.block_counts, shape.settings.order, _GROUP_ALIGNMENT_BYTES
        )

    def address(self, rank: int) -> int:
        """First byte of a rank's arena."""
        return int(self._arenas[rank].ctypes.data)

    def arena_bytes(self, rank: int) -> int:
        """Bytes of a rank's arena."""
        return int(self._arenas[rank].nbytes)

    def rank_memory(self, rank: int, transport: str, session: str) -> RankMemory:
        """A rank's arena as peers need it."""
        return RankMemory(
            rank=rank,
            transport=transport,
            session=session,
            base_address=self.address(rank),
            arena_bytes=self.arena_bytes(rank),
            regions=self._placed[rank].regions,
        )

    def write(
        self,
        layers: range,
        hashes: U64Array,
        positions: U64Array,
        blocks_by_group: Sequence[U64Array],
    ) -> None:
        """Stores the KV of some positions in those of `layers` that keep tokens.

        Shapes [positions]; blocks_by_group[i] holds each position's own block of group i.
        """
        for held in self._touched(layers):
            if held.is_state:
                continue
            blocks = blocks_by_group[held.group][:, None]
            tokens = np.uint64(self.groups[held.group].block_tokens)
            offsets = (positions % tokens)[:, None]
            heads = np.arange(len(held.heads))[None, :]
            for view, formula in zip(held.views, held.formulas, strict=True):
                view[:, blocks, heads, offsets] = formula.words(hashes).transpose(1, 0, 2, 3)

    def advance_states(
        self,
        layers: range,
        hashes_before: U64Array,
        hashes_after: U64Array,
        is_first: NDArray[np.bool_],
        pages_by_group: Sequence[U64Array],
    ) -> None:
        """Advances states from one position to another, in those of `layers` that keep them.

        An error in a page stays in it unchanged. Where `is_first`, there is no earlier position and
        the page's content is not read. Shapes [states].
        """
        for held in self._touched(layers):
            if not held.is_state:
                continue
            pages = pages_by_group[held.group]
            for view, formula in zip(held.views, held.formulas, strict=True):
                states = view[:, :, :, 0]
                found = states[:, pages].transpose(1, 0, 2, 3)
                wrong_by = found - formula.words(hashes_before)
                wrong_by[is_first] = 0
                moved = wrong_by + formula.words(hashes_after)
                states[:, pages] = moved.transpose(1, 0, 2, 3)

    def digest(self, block_ids_by_group: Sequence[Sequence[int]], token_count: int) -> int:
        """Reads the states and the KV of `token_count` tokens, on every rank, layer, head and part.

        Equals the model's closed form exactly when every byte is right and copies of a head agree.
        """
        first_copies: dict[int, int] = {}
        total = 0
        for index, (group, view, part_weights, head_names) in enumerate(self._readings):
            block_ids, whole, rest = block_ids_by_group[group], 1, 0
            if self.groups[group].kind != STATE:
                whole, rest = divmod(token_count, self.groups[group].block_tokens)
            weights = self._weights[index]
            if weights.shape[1] <= whole:
                weights = self._weights[index] = self._weights_of(group, part_weights, 2 * whole)
            blocks = _selected(block_ids[:whole])
            sums = np.einsum("lbhtw,lbhtw->h", view[:, blocks], weights[:, :whole])
            if rest:
                last = view[:, block_ids[whole], :, :rest]
                sums += np.einsum("lhtw,lhtw->h", last, weights[:, whole, :, :rest])
            for head, value in zip(head_names, sums.tolist(), strict=True):
                first = first_copies.setdefault(head, value)
                # An equal copy adds 0, so that the digest does not depend on the number of ranks.
                if value != first:
                    total += mix_int(value - first)
        return (total + sum(first_copies.values())) & WORD_MASK

    def _weights_of(self, index: int, part_weights: U64Array, block_count: int) -> U64Array:
        """The weights of a part's words in blocks of one request. Shape [layers, blocks, heads, tokens, words]."""
        group = self.groups[index]
        if group.kind == STATE:
            return part_weights[:, None, :, None, :]
        size = group.block_tokens
        by_token = self._model.position_weights((block_count + 1) * size).reshape(-1, size)
        weights: U64Array = by_token[:, None, :, None] * part_weights[:, None, :, None, :]
        return weights

    def fill_guard(self, group: int, block_ids: Sequence[int]) -> None:
        """Overwrites freed blocks of a group with the guard word."""
        if block_ids and self._verifies:
            for view in self._views_of(group):
                view[:, list(block_ids)] = self._guard.astype(view.dtype)

    def _views_of(self, group: int) -> Iterator[WordArray]:
        """Every array that holds blocks of a group."""
        for rank in self._held:
            for held in rank:
                if held.group == group:
                    yield from held.views

    def _touched(self, layers: range) -> tuple[HeldCache, ...]:
        """The parts of the ranks' caches that belong to some layers."""
        found = self._by_layers.get(layers)
        if found is None:
            parts = (held.within(layers) for rank in self._held for held in rank)
            found = self._by_layers[layers] = tuple(part for part in parts if part is not None)
        return found


def _selected(block_ids: Sequence[int]) -> slice | list[int]:
    """These blocks: a view of them where they are contiguous."""
    first, count = block_ids[0] if block_ids else 0, len(block_ids)
    used = list(block_ids)
    return slice(first, first + count) if used == list(range(first, first + count)) else used


_Reading = tuple[int, WordArray, U64Array, range]
"""A group, one part of it on one rank, its weights, and ids that copies of a head share."""


def _readings(held_by_rank: Sequence[Sequence[HeldCache]]) -> Iterator[_Reading]:
    first_names: dict[tuple[int, int, int], int] = {}
    for held in (one for rank in held_by_rank for one in rank):
        for part, (view, formula) in enumerate(zip(held.views, held.formulas, strict=True)):
            at = (held.stage, held.group, part)
            first = first_names.setdefault(at, len(first_names) * _HEADS_MAX)
            names = range(first + held.heads.start, first + held.heads.stop)
            yield held.group, view, formula.weights, names


def _new_arena(nbytes: int) -> NDArray[np.uint8]:
    return allocate_arena(nbytes, suited_alignment_bytes(nbytes))
