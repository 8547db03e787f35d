"""Faults that tests inject into a sim engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace_engine.sim.cache.memory import SimMemory


@dataclass(frozen=True, slots=True)
class CorruptByte:
    """One byte of a request's KV cache that is inverted once the cache has arrived.

    `head` counts within the rank. An empty `part` is the layer's first. A state has token 0 only.
    """

    rank: int = 0
    layer: int = 0
    head: int = 0
    token: int = 0
    byte: int = 0
    part: str = ""

    def inject(self, memory: SimMemory, block_ids_by_group: Sequence[Sequence[int]]) -> None:
        """Inverts the byte in the blocks of one request."""
        index = memory.layout().group_index(self.layer)
        block, token = divmod(self.token, max(1, memory.groups[index].block_tokens))
        memory.invert_byte(
            self.rank,
            self.layer,
            self.part,
            block_ids_by_group[index][block],
            self.head,
            token,
            self.byte,
        )


@dataclass(frozen=True, slots=True)
class SimFaults:
    """`stall_layer` is a layer that takes `stall_s` longer in every step that computes prompts.

    `fail_chunk` is the chunk of a prompt, from 0, that raises. With `lose_logits`, prefill sends none.
    """

    corrupt: CorruptByte | None = None
    stall_layer: int | None = None
    stall_s: float = 0.0
    fail_chunk: int | None = None
    lose_logits: bool = False
