"""How deep every worker holds a chain of blocks. Pure.

Sets are prefix-closed, so the masks of holders only shrink along a chain. The first and the last block decide most
lookups. A bisection decides those where all holders end together, or where few depths differ. Otherwise the lookup
reads the mask of each checkpoint, and of blocks in between only where the masks of two checkpoints differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import compress, count, repeat
from operator import and_, itemgetter, ne, xor
from typing import Final

from headrace_kv.prefix.hashing import CHECKPOINT_BLOCKS, PromptHashes

Depths = list[tuple[int, int]]
"""(blocks, mask): workers of `mask` hold exactly the first `blocks` blocks. Depths and workers are distinct."""

MaskOf = Callable[[int, int], int]
"""The holders of a block, or the second argument for an unknown block."""

_Change = tuple[int, int, int]
"""(position, before, after): the mask changes from `before` to `after` at this position."""

_HashesAt = Callable[[list[int], Iterable[int]], list[int]]
"""Returns the hashes at rising positions, given those of the blocks before."""

# A sequential lookup of so many blocks takes as long as one step of a bisection.
_PROBE_COST_BLOCKS: Final = 64
# With more holders than this that end in a segment, it is faster to look up every block.
_DENSE_HOLDERS: Final = 2
_FIRST_CHECKPOINTS: Final = 4


def depths_of_hashes(
    mask_of: MaskOf, hashes: Sequence[int], known: int, first: int, end: int
) -> Depths | None:
    """Looks up hashes that are computed already. None when some set has a hole.

    `known` is the mask of the first block, `first` the part of it that counts, and `end` the part that holds the last
    block.
    """
    changes = _bisect_changes(mask_of, hashes, first, end)
    if changes is not None:
        depths = [(position, before ^ after) for position, before, after in changes]
        return _checked(depths, first, len(hashes), end)
    among = _needed_filter(known, first)
    checkpoints = [*hashes[CHECKPOINT_BLOCKS - 1 : -1 : CHECKPOINT_BLOCKS], hashes[-1]]
    segments = _changes(mask_of, among, checkpoints, first)
    if (first ^ end).bit_count() > _DENSE_HOLDERS * len(segments):
        masks = _masks(mask_of, among, hashes)
        lost = list(map(xor, [first, *masks], masks))
        depths = list(zip(compress(count(), lost), filter(None, lost), strict=False))
    else:
        depths = _depths_in_segments(
            mask_of,
            among,
            segments,
            repeat(0),
            lambda positions, _: list(map(hashes.__getitem__, positions)),
            len(hashes),
        )
    return _checked(depths, first, len(hashes), end)


def depths_of_prompt(
    mask_of: MaskOf, prompt: PromptHashes, known: int, first: int
) -> tuple[Depths | None, int]:
    """Looks up a prompt, and returns the depths and the number of blocks searched.

    It hashes about twice as many blocks as the deepest holder has, at most. None like `depths_of_hashes`.
    """
    checkpoints = _checkpoints_to_search(mask_of, prompt, first)
    block_count = len(checkpoints) * CHECKPOINT_BLOCKS
    end = mask_of(checkpoints[-1], 0) & first if checkpoints else first
    if end and block_count < prompt.block_count:
        block_count = prompt.block_count
        checkpoints = [*checkpoints, prompt[block_count - 1]]
        end = mask_of(checkpoints[-1], 0) & first
    if end == first:
        return [(block_count, first)], block_count
    among = _needed_filter(known, first)
    changes = _bisect_changes(mask_of, checkpoints, first, end)
    if changes is None:
        changes = _changes(mask_of, among, checkpoints, first)
    changes.sort()
    parents = [prompt.checkpoint_before(segment) for segment, _, _ in changes]
    depths = _depths_in_segments(mask_of, among, changes, parents, prompt.hashes_at, block_count)
    return _checked(depths, first, block_count, end), block_count


def linear_lookup(mask_of: MaskOf, hashes: Sequence[int], holders: int) -> Depths:
    """Looks up every block, from the `holders` of the first. Correct for sets with holes too."""
    depths: Depths = []
    last = -1
    for depth, mask in enumerate(map(mask_of, hashes, repeat(0))):
        if mask is last:
            continue
        last = mask
        still = mask & holders
        if still != holders:
            depths.append((depth, holders ^ still))
            holders = still
            if not still:
                return depths
    depths.append((len(hashes), holders))
    return depths


def _checkpoints_to_search(mask_of: MaskOf, prompt: PromptHashes, holders: int) -> list[int]:
    """The first checkpoints of the prompt: at least as many as any holder has."""
    total = prompt.block_count // CHECKPOINT_BLOCKS
    count = min(_FIRST_CHECKPOINTS, total)
    prompt.compute_checkpoints(count)
    while count < total and mask_of(prompt.checkpoints[count - 1], 0) & holders:
        count = min(2 * count, total)
        prompt.compute_checkpoints(count)
    return prompt.checkpoints if len(prompt.checkpoints) == count else prompt.checkpoints[:count]


def _bisect_changes(
    mask_of: MaskOf, hashes: Sequence[int], first: int, end: int
) -> list[_Change] | None:
    """All changes from the mask `first` before these blocks to `end` at the last. None if there are many."""
    low, high, after = -1, len(hashes) - 1, end
    while high - low > 1:
        middle = low + high >> 1
        mask = mask_of(hashes[middle], 0) & first
        if mask == first:
            low = middle
        else:
            high, after = middle, mask
    changes = [(high, first, after)]
    if after == end:
        return changes
    spans = [(high, after, len(hashes) - 1, end)]
    probes_left = len(hashes) // _PROBE_COST_BLOCKS
    while spans:
        low, low_mask, high, high_mask = spans.pop()
        if high - low == 1:
            changes.append((high, low_mask, high_mask))
            continue
        if not probes_left:
            return None
        probes_left -= 1
        middle = low + high >> 1
        mask = mask_of(hashes[middle], 0) & first
        if mask != high_mask:
            spans.append((middle, mask, high, high_mask))
        if mask != low_mask:
            spans.append((low, low_mask, middle, mask))
    return changes


def _needed_filter(known: int, first: int) -> int:
    """The filter for later masks. None is needed (-1) when all holders of the first block count."""
    return -1 if known == first else first


def _masks(mask_of: MaskOf, among: int, hashes: Iterable[int]) -> list[int]:
    masks = map(mask_of, hashes, repeat(0))
    return list(masks if among < 0 else map(and_, masks, repeat(among)))


def _changes(mask_of: MaskOf, among: int, hashes: Iterable[int], first: int) -> list[_Change]:
    """All changes of the mask along these blocks. `first` is the mask before them."""
    afters = _masks(mask_of, among, hashes)
    befores = [first, *afters]
    return list(compress(zip(count(), befores, afters), map(ne, befores, afters)))


def _depths_in_segments(
    mask_of: MaskOf,
    among: int,
    changes: list[_Change],
    parents: Iterable[int],
    hashes_at: _HashesAt,
    block_count: int,
) -> Depths:
    """The depths within segments. `changes` gives the masks before and at the end of each segment.

    `parents` are the hashes of the blocks before the segments. No Python statement runs once for each block. Returns no
    depth when the masks of the last segment contradict `changes`, as they do for a set with a hole.
    """
    segments, befores, afters = map(list, zip(*changes, strict=True))
    positions = [segment * CHECKPOINT_BLOCKS for segment in segments]
    depths: Depths = []
    for _ in range(CHECKPOINT_BLOCKS - 1):
        blocks = hashes_at(positions, parents)
        masks = _masks(mask_of, among, blocks)
        lost = list(map(xor, befores, masks))
        depths += zip(compress(positions, lost), filter(None, lost), strict=True)
        unfinished = list(map(ne, masks, afters))
        if not all(unfinished):
            positions = list(compress(positions, unfinished))
            afters = list(compress(afters, unfinished))
            masks = list(compress(masks, unfinished))
            blocks = list(compress(blocks, unfinished))
        if not positions:
            return depths
        befores, parents = masks, blocks
        positions = [position + 1 for position in positions]
        if positions[-1] >= block_count:
            return []
    depths += zip(positions, map(xor, befores, afters), strict=True)
    return depths


def _checked(depths: Depths, first: int, block_count: int, end: int) -> Depths | None:
    """Adds the workers that hold all blocks. None when the depths show a hole in some set."""
    if end:
        depths.append((block_count, end))
    if sum(map(int.bit_count, map(itemgetter(1), depths))) != first.bit_count():
        return None
    return depths
