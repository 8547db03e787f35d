"""Faults that tests ask a sim engine for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CorruptByte:
    """One byte of a request's KV cache that is inverted once the cache has arrived. `head` counts
    within the rank; an empty `part` is the layer's first; a state has token 0 only.
    """

    rank: int = 0
    layer: int = 0
    head: int = 0
    token: int = 0
    byte: int = 0
    part: str = ""


@dataclass(frozen=True, slots=True)
class SimFaults:
    """`stall_layer`: a layer that takes `stall_s` longer, in every step that computes prompts.

    `fail_chunk`: the chunk of a prompt, from 0, whose computation raises. `lose_logits`: prefill hands none over.
    """

    corrupt: CorruptByte | None = None
    stall_layer: int | None = None
    stall_s: float = 0.0
    fail_chunk: int | None = None
    lose_logits: bool = False
