"""How deep every worker holds a chain of blocks. Pure.

Sets are prefix-closed, so the masks of holders only shrink along a chain. The first and the last block decide most
lookups. A bisection of the checkpoints decides those where all holders end together, or where few depths differ.
Otherwise the lookup reads the mask of each checkpoint. It reads the blocks in between where the masks of two
checkpoints differ, or all blocks where many do. Then its time depends on the blocks, and hardly on the workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, compress, count, repeat
from operator import and_, ne
from typing import Final

from headrace_kv.prefix.hashing import CHECKPOINT_BLOCKS, PromptHashes
from headrace_router.prefix_cache.depths import Depths

MaskOf = Callable[[int, int], int]
"""The holders of a block, or the second argument for an unknown block."""

_Change = tuple[int, int, int]
"""(position, before, after): the mask changes from `before` to `after` at this position."""

_HashesBetween = Callable[[int, int], list[int]]
"""Returns the hashes of the blocks from one position to before another."""

# A sequential lookup of so many blocks takes as long as one step of a bisection.
_PROBE_COST_BLOCKS: Final = 64
# A lookup of so many blocks, with all others, takes as long as that of the blocks of one segment alone.
_SEGMENT_COST_BLOCKS: Final = 32
_FIRST_CHECKPOINTS: Final = 4


@dataclass(frozen=True, slots=True)
class PromptDepths:
    """What a lookup found in the first `block_count` blocks. The workers of the mask `end` hold the last of them.

    `depths` is None when some set has a hole.
    """

    depths: Depths | None
    block_count: int
    end: int


def depths_of_hashes(
    mask_of: MaskOf, hashes: Sequence[int], known: int, first: int, end: int
) -> Depths | None:
    """Looks up hashes that are computed already. None when some set has a hole.

    `known` is the mask of the first block, `first` the part of it that counts, and `end` the part that holds the last
    block.
    """
    changes = _bisect_changes(mask_of, hashes, first, end)
    if changes is not None:
        lost = [(position, before ^ after) for position, before, after in changes]
        return _depths_of_lost(lost, first, end, len(hashes))
    checkpoints = [*hashes[CHECKPOINT_BLOCKS - 1 : -1 : CHECKPOINT_BLOCKS], hashes[-1]]
    among = _needed_filter(known, first)
    changes = _changes(_masks(mask_of, among, checkpoints), first)
    return _depths_in_segments(
        *(mask_of, among, changes, first, end),
        *(lambda start, stop: list(hashes[start:stop]), len(hashes)),
    )


def depths_of_prompt(mask_of: MaskOf, prompt: PromptHashes, known: int, first: int) -> PromptDepths:
    """Looks up a prompt. It hashes about twice as many blocks as the deepest holder has, at most.

    `known` and `first` like `depths_of_hashes`.
    """
    checkpoints = _checkpoints_to_search(mask_of, prompt, first)
    block_count = len(checkpoints) * CHECKPOINT_BLOCKS
    end = mask_of(checkpoints[-1], 0) & first if checkpoints else first
    if end and block_count < prompt.block_count:
        block_count = prompt.block_count
        checkpoints = [*checkpoints, prompt[block_count - 1]]
        end = mask_of(checkpoints[-1], 0) & first
    if end == first:
        return PromptDepths(Depths.of([(block_count, first)]), block_count, end)
    among = _needed_filter(known, first)
    changes = _bisect_changes(mask_of, checkpoints, first, end)
    if changes is None:
        changes = _changes(_masks(mask_of, among, checkpoints), first)
    depths = _depths_in_segments(mask_of, among, changes, first, end, prompt.between, block_count)
    return PromptDepths(depths, block_count, end)


def linear_lookup(mask_of: MaskOf, hashes: Sequence[int], holders: int) -> Depths:
    """Looks up every block, from the `holders` of the first. Correct for sets with holes too."""
    lost: list[tuple[int, int]] = []
    last = -1
    for depth, mask in enumerate(map(mask_of, hashes, repeat(0))):
        if mask is last:
            continue
        last = mask
        still = mask & holders
        if still != holders:
            lost.append((depth, holders ^ still))
            holders = still
            if not still:
                break
    return Depths.of([*lost, (len(hashes), holders)])


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


def _changes(masks: list[int], first: int) -> list[_Change]:
    """All changes along these masks. `first` is the mask before them."""
    befores = [first, *masks]
    return list(compress(zip(count(), befores, masks), map(ne, befores, masks)))


def _depths_in_segments(
    mask_of: MaskOf,
    among: int,
    changes: list[_Change],
    first: int,
    end: int,
    hashes_between: _HashesBetween,
    block_count: int,
) -> Depths | None:
    """The depths, where `changes` gives the masks before and at the end of each segment. None when a set has a hole."""
    if len(changes) * _SEGMENT_COST_BLOCKS > block_count:
        masks = _masks(mask_of, among, hashes_between(0, block_count))
        # In a set with a hole, a mask is no subset of those before.
        closed = accumulate([first, *masks], and_)
        return Depths.counted(masks) if list(closed)[1:] == masks else None
    lost: list[tuple[int, int]] = []
    for segment, before, after in changes:
        start = segment * CHECKPOINT_BLOCKS
        last = min(start + CHECKPOINT_BLOCKS, block_count) - 1
        masks = [*_masks(mask_of, among, hashes_between(start, last)), after]
        lost += [
            (position, old ^ new)
            for position, old, new in zip(count(start), [before, *masks], masks)
            if old != new
        ]
    return _depths_of_lost(lost, first, end, block_count)


def _depths_of_lost(
    lost: list[tuple[int, int]], first: int, end: int, block_count: int
) -> Depths | None:
    """The depths, from the workers that lack the block at each position but hold the one before.

    None when they are not exactly the workers that end before `end`, once each: some set has a hole.
    """
    losses = sum(mask.bit_count() for _, mask in lost)
    if losses != (first ^ end).bit_count():
        return None
    return Depths.of([*lost, (block_count, end)])
