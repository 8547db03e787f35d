"""Turns changes of an engine's prefix cache into numbered events for routers. Pure.

In each tier a block is announced only while its parent is. So a router can find the depth of a
prefix by binary search. A block with a missing parent is announced once the parent is cached again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Final

from headrace_common.errors import InternalError
from headrace_kv.prefix.events import (
    HASH_BYTES,
    EventKind,
    KvEvent,
    Tier,
    pack_hashes,
    xor_of,
)

EVENT_HASHES_MAX: Final = 4_096
SNAPSHOT_HASHES_MAX: Final = 32_768
REPLAY_HASHES_MAX: Final = 262_144
REPLAY_EVENTS_MAX: Final = 16_384


class _AnnouncedSet:
    """The blocks held in one tier. The announced ones are those that have all ancestors held too."""

    def __init__(self) -> None:
        self._parent_of: dict[int, int | None] = {}
        # Held children by parent. Most blocks have one; a set for each would triple the memory.
        self._children_of: dict[int, int | set[int]] = {}
        # In the order of announcing, so parents come before children.
        self.announced: dict[int, None] = {}
        self.xor = 0

    def add_chain(self, parent: int | None, hashes: Iterable[int]) -> list[int]:
        """Adds a chain of blocks after `parent`. Returns the newly announced blocks, parents first."""
        fresh: list[int] = []
        for block in hashes:
            if block not in self._parent_of:
                self._parent_of[block] = parent
                if parent is not None:
                    self._link(parent, block)
            if block not in self.announced and (parent is None or parent in self.announced):
                self._announce(block, fresh)
            parent = block
        self.xor ^= xor_of(fresh)
        return fresh

    def remove(self, hashes: Iterable[int]) -> list[int]:
        """Removes blocks. Returns those that are no longer announced, children first."""
        gone: list[int] = []
        for block in hashes:
            if block not in self._parent_of:
                continue
            parent = self._parent_of.pop(block)
            if parent is not None:
                self._unlink(parent, block)
            if block in self.announced:
                self._withdraw(block, gone)
        self.xor ^= xor_of(gone)
        return gone

    def _announce(self, block: int, fresh: list[int]) -> None:
        waiting = [block]
        while waiting:
            block = waiting.pop()
            self.announced[block] = None
            fresh.append(block)
            waiting.extend(self._held_children(block))

    def _withdraw(self, block: int, gone: list[int]) -> None:
        start = len(gone)
        waiting = [block]
        while waiting:
            block = waiting.pop()
            del self.announced[block]
            gone.append(block)
            waiting.extend(child for child in self._held_children(block) if child in self.announced)
        gone[start:] = reversed(gone[start:])

    def _held_children(self, block: int) -> Iterable[int]:
        children = self._children_of.get(block)
        if children is None:
            return ()
        return (children,) if isinstance(children, int) else children

    def _link(self, parent: int, child: int) -> None:
        children = self._children_of.get(parent)
        if children is None:
            self._children_of[parent] = child
        elif isinstance(children, int):
            self._children_of[parent] = {children, child}
        else:
            children.add(child)

    def _unlink(self, parent: int, child: int) -> None:
        children = self._children_of[parent]
        if isinstance(children, int):
            del self._children_of[parent]
            return
        children.discard(child)
        if not children:
            del self._children_of[parent]


class PrefixEventLog:
    """The announced sets of one worker, and the latest events for replay. One thread owns it.

    `tiers` are the worker's, fastest first. The set of a slower tier contains those of the faster
    ones. Memory: about 0.2 kB per block and tier, and `replay_hashes_max` hashes.
    """

    def __init__(
        self,
        incarnation: str,
        tiers: Sequence[Tier] = (Tier.DEVICE,),
        replay_hashes_max: int = REPLAY_HASHES_MAX,
        event_hashes_max: int = EVENT_HASHES_MAX,
    ) -> None:
        if not tiers or list(tiers) != sorted(set(tiers)):
            raise InternalError(f"tiers {tiers} are not in order")
        self.sequence = 0
        self._incarnation = incarnation
        self._sets = {tier: _AnnouncedSet() for tier in tiers}
        # With several tiers: those that hold each block, as a bitmask.
        self._places: dict[int, int] = {}
        self._ring: deque[KvEvent] = deque()
        self._ring_hashes = 0
        self._replay_hashes_max = replay_hashes_max
        self._event_hashes_max = event_hashes_max

    def stored(
        self, parent: int | None, hashes: Sequence[int], tier: Tier = Tier.DEVICE
    ) -> list[KvEvent]:
        """Adds consecutive blocks after `parent` to `tier`; None starts a prompt. Returns the new events."""
        return self.stored_chains([(parent, hashes)], tier)

    def stored_chains(
        self,
        chains: Sequence[tuple[int | None, Sequence[int]]],
        tier: Tier = Tier.DEVICE,
    ) -> list[KvEvent]:
        """As `stored` for several (parent, hashes) in order, in as few events as possible."""
        self._check_tier(tier)
        if len(self._sets) > 1:
            for _, hashes in chains:
                for block in hashes:
                    self._places[block] = self._places.get(block, 0) | 1 << tier
        events: list[KvEvent] = []
        for at, announced in self._sets.items():
            if at >= tier:
                fresh: list[int] = []
                for parent, hashes in chains:
                    fresh += announced.add_chain(parent, hashes)
                events += self._number("stored", at, announced, fresh)
        return events

    def removed(self, hashes: Sequence[int], tier: Tier = Tier.DEVICE) -> list[KvEvent]:
        """Removes blocks from `tier` and ignores unknown ones. Returns the new events."""
        self._check_tier(tier)
        single = len(self._sets) == 1
        if not single:
            self._remove_places(hashes, tier)
        events: list[KvEvent] = []
        for at, announced in self._sets.items():
            if at < tier:
                continue
            faster = (2 << at) - 1
            left = (
                hashes
                if single
                else [block for block in hashes if not self._places.get(block, 0) & faster]
            )
            events += self._number("removed", at, announced, announced.remove(left))
        return events

    def cleared(self) -> list[KvEvent]:
        """Empties every tier. Returns the new event."""
        self._sets = {tier: _AnnouncedSet() for tier in self._sets}
        self._places.clear()
        self.sequence += 1
        event = KvEvent(
            self._incarnation, self.sequence, next(iter(self._sets)), "cleared", b"", 0, 0
        )
        self._keep_for_replay(event)
        return [event]

    def heartbeats(self) -> list[KvEvent]:
        """The sequence and the digest of each tier. Heartbeats are neither numbered nor replayed."""
        return [
            KvEvent(
                self._incarnation,
                self.sequence,
                tier,
                "heartbeat",
                b"",
                len(announced.announced),
                announced.xor,
            )
            for tier, announced in self._sets.items()
        ]

    def replay(self, since_sequence: int) -> list[KvEvent] | None:
        """The events after `since_sequence`; None when they are not all kept, so that a snapshot is needed."""
        if since_sequence == self.sequence:
            return []
        oldest = self._ring[0].sequence if self._ring else self.sequence + 1
        if not oldest - 1 <= since_sequence < self.sequence:
            return None
        return list(islice(self._ring, since_sequence + 1 - oldest, None))

    def snapshot(self) -> list[KvEvent]:
        """All announced blocks, as of `sequence`, in parts."""
        parts: list[KvEvent] = []
        for tier, announced in self._sets.items():
            packed = pack_hashes(announced.announced)
            step = SNAPSHOT_HASHES_MAX * HASH_BYTES
            parts += [
                KvEvent(
                    self._incarnation,
                    self.sequence,
                    tier,
                    "snapshot",
                    packed[start : start + step],
                    len(announced.announced),
                    announced.xor,
                )
                for start in range(0, len(packed) or 1, step)
            ]
        parts[-1] = parts[-1]._replace(last=True)
        return parts

    def _number(
        self, kind: EventKind, tier: Tier, announced: _AnnouncedSet, hashes: list[int]
    ) -> list[KvEvent]:
        """Numbered events for a change of the set. Each has the digest after its own part of the change."""
        sign = 1 if kind == "stored" else -1
        pieces = [
            hashes[start : start + self._event_hashes_max]
            for start in range(0, len(hashes), self._event_hashes_max)
        ]
        count = len(announced.announced) - sign * len(hashes)
        digest = announced.xor ^ xor_of(hashes) if len(pieces) > 1 else announced.xor
        events = []
        for piece in pieces:
            self.sequence += 1
            count += sign * len(piece)
            if len(pieces) > 1:
                digest ^= xor_of(piece)
            event = KvEvent(
                self._incarnation, self.sequence, tier, kind, pack_hashes(piece), count, digest
            )
            self._keep_for_replay(event)
            events.append(event)
        return events

    def _keep_for_replay(self, event: KvEvent) -> None:
        self._ring.append(event)
        self._ring_hashes += len(event.packed) // HASH_BYTES
        while self._ring_hashes > self._replay_hashes_max or len(self._ring) > REPLAY_EVENTS_MAX:
            self._ring_hashes -= len(self._ring.popleft().packed) // HASH_BYTES

    def _remove_places(self, hashes: Iterable[int], tier: Tier) -> None:
        for block in hashes:
            places = self._places.get(block, 0) & ~(1 << tier)
            if places:
                self._places[block] = places
            else:
                self._places.pop(block, None)

    def _check_tier(self, tier: Tier) -> None:
        if tier not in self._sets:
            raise InternalError(f"this worker has no tier {tier.name}")
