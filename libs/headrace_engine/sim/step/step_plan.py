"""Decides what a step computes. Pure."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import NamedTuple

from headrace_engine.sim.request.sequence import Sequence


class Chunk(NamedTuple):
    """Positions [start, end) of one sequence."""

    sequence: Sequence
    start: int
    end: int

    @property
    def is_decode(self) -> bool:
        """Whether it is the last known token of a decode request, and so gives a new token."""
        return self.sequence.generation is not None and self.end - self.start == 1


def plan_step(sequences: Items[Sequence], token_budget: int, block_tokens: int) -> list[Chunk]:
    """One token of each sequence that generates; prompts share the rest of the budget.

    `sequences` are in order of preference. Prompts get equal shares of whole blocks, but for a
    prompt's last chunk. At least one block is always computed.
    """
    chunks: list[Chunk] = []
    prompts: list[Sequence] = []
    for sequence in sequences:
        pending = sequence.pending
        if pending == 1 and sequence.generation is not None:
            chunks.append(Chunk(sequence, sequence.computed, sequence.computed + 1))
        elif pending:
            prompts.append(sequence)
    budget = max(block_tokens, token_budget - len(chunks))
    while prompts and budget >= block_tokens:
        sequence = prompts.pop(0)
        share = max(budget // (len(prompts) + 1) // block_tokens, 1) * block_tokens
        end = min(len(sequence.tokens), sequence.computed + share)
        chunks.append(Chunk(sequence, sequence.computed, end))
        budget -= end - sequence.computed
    return chunks
