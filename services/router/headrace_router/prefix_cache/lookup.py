"""How deep every worker holds a chain of blocks. Pure.

Sets are prefix-closed, so along a chain the masks of holders only shrink. The first and the last block settle most
lookups, a bisection those where all holders end together, and a halving those with few depths. Where they are many, the
chain is read station by station, and between two stations only where their masks differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import compress, count, repeat
from operator import and_, itemgetter, ne, xor
from typing import Final

from headrace_kv.prefix.hashing import CHECKPOINT_BLOCKS, PromptHashes

Depths = list[tuple[int, int]]
"""(blocks, mask): workers of `mask` hold exactly the first `blocks` blocks. No depth and no worker comes twice."""

MaskOf = Callable[[int, int], int]
"""A block's holders, or the second argument when nobody has heard of it."""

_Change = tuple[int, int, int]
"""(position, before, after): the mask at this position, and the other one before it."""

_Following = Callable[[list[int], Iterable[int]], list[int]]
"""Names the blocks at rising positions, given the names of the blocks before them."""

# So many blocks one after the other take as long as one that is chosen by those looked at before.
_PROBE_COST_BLOCKS: Final = 64
# So many holders that end between two stations make it quicker to look at every block.
_DENSE_HOLDERS: Final = 2
_FIRST_REACH_STATIONS: Final = 4


def depths_of_hashes(
    mask_of: MaskOf, hashes: Sequence[int], known: int, first: int, end: int
) -> Depths | None:
    """For hashes that are ready. Of the first block's mask `known`, `first` count, and of these `end` hold the last.

    None when some set turns out to have a hole.
    """
    changes = _few(mask_of, hashes, first, end)
    if changes is not None:
        depths = [(position, before ^ after) for position, before, after in changes]
        return _checked(depths, first, len(hashes), end)
    among = _needed_filter(known, first)
    marks = [*hashes[CHECKPOINT_BLOCKS - 1 : -1 : CHECKPOINT_BLOCKS], hashes[-1]]
    stretches = _changes(mask_of, among, marks, first)
    if (first ^ end).bit_count() > _DENSE_HOLDERS * len(stretches):
        masks = _masks(mask_of, among, hashes)
        lost = list(map(xor, [first, *masks], masks))
        depths = list(zip(compress(count(), lost), filter(None, lost), strict=False))
    else:
        depths = _settled(
            mask_of,
            among,
            stretches,
            repeat(0),
            lambda positions, _: list(map(hashes.__getitem__, positions)),
        )
    return _checked(depths, first, len(hashes), end)


def depths_of_prompt(
    mask_of: MaskOf, prompt: PromptHashes, known: int, first: int
) -> tuple[Depths | None, int]:
    """The same, hashing no further than any holder's blocks reach (and up to as far again); also how far that is."""
    marks = _reached(mask_of, prompt, first)
    block_count = len(marks) * CHECKPOINT_BLOCKS
    end = mask_of(marks[-1], 0) & first if marks else first
    if end and block_count < prompt.block_count:
        block_count = prompt.block_count
        marks = [*marks, prompt[block_count - 1]]
        end = mask_of(marks[-1], 0) & first
    if end == first:
        return [(block_count, first)], block_count
    among = _needed_filter(known, first)
    changes = _few(mask_of, marks, first, end)
    if changes is None:
        changes = _changes(mask_of, among, marks, first)
    changes.sort()
    parents = [prompt.before(stretch) for stretch, _, _ in changes]
    depths = _settled(mask_of, among, changes, parents, prompt.following)
    return _checked(depths, first, block_count, end), block_count


def linear_lookup(mask_of: MaskOf, hashes: Sequence[int], holders: int) -> Depths:
    """Block by block, from the holders of the first: what all must equal, and the way out when some set has a hole."""
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


def _reached(mask_of: MaskOf, prompt: PromptHashes, holders: int) -> list[int]:
    """The stations, from the first on, of which somebody may hold some, and further ones."""
    total = prompt.block_count // CHECKPOINT_BLOCKS
    reach = min(_FIRST_REACH_STATIONS, total)
    prompt.reach(reach)
    while reach < total and mask_of(prompt.stations[reach - 1], 0) & holders:
        reach = min(2 * reach, total)
        prompt.reach(reach)
    return prompt.stations if len(prompt.stations) == reach else prompt.stations[:reach]


def _few(mask_of: MaskOf, hashes: Sequence[int], first: int, end: int) -> list[_Change] | None:
    """All changes from the mask `first`, before the first of these blocks, to `end` at the last; None if many."""
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
    """What masks further on are to be cut to: to anything, when only those that count have the first block."""
    return -1 if known == first else first


def _masks(mask_of: MaskOf, among: int, hashes: Iterable[int]) -> list[int]:
    known = map(mask_of, hashes, repeat(0))
    return list(known if among < 0 else map(and_, known, repeat(among)))


def _changes(mask_of: MaskOf, among: int, hashes: Iterable[int], first: int) -> list[_Change]:
    """All of them, where the mask before is `first`."""
    afters = _masks(mask_of, among, hashes)
    befores = [first, *afters]
    return list(compress(zip(count(), befores, afters), map(ne, befores, afters)))


def _settled(
    mask_of: MaskOf,
    among: int,
    changes: list[_Change],
    parents: Iterable[int],
    following: _Following,
) -> Depths:
    """The depths within stretches whose last blocks' masks are other ones than those before them.

    `parents` name the blocks before the stretches. Python takes no step of its own for a block.
    """
    stretches, befores, afters = map(list, zip(*changes, strict=True))
    positions = [stretch * CHECKPOINT_BLOCKS for stretch in stretches]
    depths: Depths = []
    for _ in range(CHECKPOINT_BLOCKS - 1):
        blocks = following(positions, parents)
        known = _masks(mask_of, among, blocks)
        lost = list(map(xor, befores, known))
        depths += zip(compress(positions, lost), filter(None, lost), strict=True)
        unsettled = list(map(ne, known, afters))
        if not all(unsettled):
            positions = list(compress(positions, unsettled))
            afters = list(compress(afters, unsettled))
            known = list(compress(known, unsettled))
            blocks = list(compress(blocks, unsettled))
        if not positions:
            return depths
        befores, parents = known, blocks
        positions = [position + 1 for position in positions]
    depths += zip(positions, map(xor, befores, afters), strict=True)
    return depths


def _checked(depths: Depths, first: int, block_count: int, end: int) -> Depths | None:
    """With those who hold everything; None when somebody had a block again after having lacked one."""
    if end:
        depths.append((block_count, end))
    if sum(map(int.bit_count, map(itemgetter(1), depths))) != first.bit_count():
        return None
    return depths
