"""The KV memory of a sim engine's ranks: one arena each, in [layer][block][head][token][channel]
order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace_engine.sim.mix import WORD_MASK, U64Array, mix_int
from headrace_engine.sim.model import SimModel
from headrace_engine.sim.settings import SimShape
from headrace_kv.arena import allocate_arena, suited_alignment_bytes
from headrace_kv.layout import KvLayout, RankMemory
from headrace_kv.region_plan import place_regions


class SimMemory:
    """Writes a model's KV and reads it back. Not thread-safe; transports write into it from
    outside.

    Blocks that nobody holds are filled with a guard word, which is this memory's own.
    """

    def __init__(self, model: SimModel, shape: SimShape, guard_seed: int) -> None:
        self._model = model
        self._block_tokens = shape.block_tokens
        self._block_count = shape.block_count
        self._ranks = shape.tensor_parallel_size
        self.heads_per_rank = max(1, model.heads // self._ranks)
        self._guard = np.uint64(mix_int(guard_seed))
        self._arenas = [self._new_arena() for _ in range(self._ranks)]

    def _new_arena(self) -> U64Array:
        model = self._model
        shape = (
            model.layers,
            self._block_count,
            self.heads_per_rank,
            self._block_tokens,
            model.word_count,
        )
        nbytes = 8 * int(np.prod(shape))
        raw = allocate_arena(nbytes, suited_alignment_bytes(nbytes))
        arena: U64Array = raw.view(np.uint64).reshape(shape)
        arena[...] = self._guard
        return arena

    def heads_of(self, rank: int) -> slice:
        """The model's heads that a rank holds; ranks beyond the head count hold copies."""
        first = rank * self._model.heads // self._ranks
        return slice(first, first + self.heads_per_rank)

    def layout(self) -> KvLayout:
        """How the memory lies, for peers."""
        return KvLayout.attention(
            model=self._model.name(),
            dtype="uint8",
            layer_count=self._model.layers,
            kv_head_count=self._model.heads,
            tensor_parallel_size=self._ranks,
            block_tokens=self._block_tokens,
            parts={"kv": self._model.head_bytes},
        )

    def address(self, rank: int) -> int:
        """First byte of a rank's arena."""
        return int(self._arenas[rank].ctypes.data)

    def arena_bytes(self, rank: int) -> int:
        """Bytes of a rank's arena."""
        return int(self._arenas[rank].nbytes)

    def rank_memory(self, rank: int, transport: str, session: str) -> RankMemory:
        """A rank's arena as peers need it."""
        placed = place_regions(self.layout(), rank, (self._block_count,))
        return RankMemory(
            rank=rank,
            transport=transport,
            session=session,
            base_address=self.address(rank),
            arena_bytes=placed.arena_bytes,
            regions=placed.regions,
        )

    def write(
        self, layers: slice, hashes: U64Array, positions: U64Array, block_ids: U64Array
    ) -> None:
        """Stores the KV of some positions. Shapes [positions]; `block_ids` holds each position's
        own block.
        """
        offsets = (positions % np.uint64(self._block_tokens))[:, None]
        blocks = block_ids[:, None]
        heads = np.arange(self.heads_per_rank)[None, :]
        for rank, arena in enumerate(self._arenas):
            words = self._model.kv_words(hashes, layers, self.heads_of(rank))
            arena[layers][:, blocks, heads, offsets] = words.transpose(1, 0, 2, 3)

    def digest(self, block_ids: Sequence[int], token_count: int) -> int:
        """Reads the KV of `token_count` tokens back, on every rank, layer and head.

        Equals the model's closed form exactly when every byte is right and copies of a head agree.
        """
        used = list(block_ids[: -(-token_count // self._block_tokens)])
        capacity = len(used) * self._block_tokens
        weights = self._model.position_weights(capacity).copy()
        weights[token_count:] = 0
        by_block = weights.reshape(len(used), self._block_tokens)
        contiguous = used[-1] - used[0] == len(used) - 1 and used == list(
            range(used[0], used[-1] + 1)
        )
        selected = slice(used[0], used[-1] + 1) if contiguous else used
        first_copies: dict[int, int] = {}
        total = 0
        for rank, arena in enumerate(self._arenas):
            heads = self.heads_of(rank)
            sums = np.einsum("lbhtw,bt->lhw", arena[:, selected], by_block)
            sums *= self._model.weights[:, heads]
            by_head = sums.sum(axis=(0, 2), dtype=np.uint64).tolist()
            for head, value in enumerate(by_head, heads.start):
                first = first_copies.setdefault(head, value)
                # Zero for a copy that agrees, so that the digest does not depend on the number of ranks.
                total += mix_int(value - first) if value != first else 0
        return (total + sum(first_copies.values())) & WORD_MASK

    def fill_guard(self, block_ids: Sequence[int]) -> None:
        """Overwrites blocks that nobody holds any more."""
        if block_ids:
            for arena in self._arenas:
                arena[:, list(block_ids)] = self._guard

    def guard_violations(self, block_ids: Sequence[int]) -> tuple[int, ...]:
        """Those of the given free blocks that somebody wrote to."""
        ids = np.asarray(block_ids, np.intp)
        touched = np.zeros(len(ids), bool)
        for arena in self._arenas:
            touched |= (arena[:, ids] != self._guard).any(axis=(0, 2, 3, 4))
        return tuple(ids[touched].tolist())

    def invert_byte(
        self, rank: int, layer: int, block: int, head: int, token: int, byte: int
    ) -> None:
        """Makes one byte wrong: `head` within the rank, `token` within the block, `byte` within the
        token.
        """
        self._arenas[rank].view(np.uint8)[layer, block, head, token, byte] ^= 0xFF
