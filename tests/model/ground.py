"""The parts of the model's world: sizes, memory without bytes, writes and scripts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from headrace_kv.layout import KvLayout, RankMemory, Region
from headrace_kv.shard_map import place_regions
from headrace_kv.transport.base import KvTransport, WriteResult

LEASE_S = 3.0
QUIET_S = 1.0
"""How long bytes may land after a write has failed."""
TRANSPORT_S = 2.0
QUIESCE_S = 4.0
DEADLINE_S = 6.0
HANDSHAKE_S = 5.0
BLOCK_TOKENS = 4
BLOCKS = 8
# The two clocks may differ, so a sender's own deadline may be much later.
SENDER_DEADLINE_S = 40.0
BOUND_S = DEADLINE_S + QUIESCE_S + 2 * LEASE_S + TRANSPORT_S + 1.5
"""By when every transfer is FREE, counted from its reservation."""

LONG_S = 22.0
"""Longer than every wait except the senders' deadline."""


class Violation(AssertionError):
    """An invariant does not hold."""


@dataclass(frozen=True)
class Settings:
    """A world's sizes and times."""

    ranks: int = 1
    layers: int = 1
    chunks: int = 1
    retries: int = 1
    quarantine_s: float = TRANSPORT_S
    quiet_after_failure_s: float = QUIET_S


@dataclass(eq=False)
class Script:
    """Steps of an engine in order. None runs before `open_s`."""

    name: str
    steps: deque[tuple[str, Callable[[], None]]] = field(default_factory=deque)
    open_s: float = 0.0

    def step(self) -> None:
        """Runs the next step."""
        _, act = self.steps.popleft()
        act()


Action = tuple[str, Callable[[], None]]


@dataclass(eq=False)
class Write:
    """One write in flight. `future` is None once the sender was notified of its end, or has crashed."""

    transport: KvTransport
    session: str
    transfer_id: str
    keys: frozenset[tuple[int, int, int]]
    """(source rank, layer, destination block)"""
    end_s: float
    future: Future[WriteResult] | None
    late: bool = False
    """Whether it lands at a set time, not by choice."""


def layout_of(ranks: int, settings: Settings) -> KvLayout:
    return KvLayout.attention(
        model="model",
        dtype="float32",
        layer_count=settings.layers,
        kv_head_count=settings.ranks,
        tensor_parallel_size=ranks,
        block_tokens=BLOCK_TOKENS,
        parts={"kv": 8},
    )


def memories(layout: KvLayout, session: str) -> list[RankMemory]:
    """Memory with addresses and without bytes."""
    found = []
    for rank in range(layout.tensor_parallel_size):
        placed = place_regions(layout, rank, (BLOCKS,))
        found.append(
            RankMemory(
                rank=rank,
                transport="model",
                session=session,
                base_address=(rank + 1) << 32,
                arena_bytes=placed.arena_bytes,
                regions=placed.regions,
            )
        )
    return found


def region_at(memory: RankMemory, offset: int) -> Region:
    return next(r for r in memory.regions if r.offset_bytes <= offset < r.end_bytes)
