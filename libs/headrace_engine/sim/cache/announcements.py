"""Names the sim engine's findable blocks as routers do."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

from headrace_engine.prefix.announcer import PrefixAnnouncer
from headrace_engine.sim.request.sequence import Sequence
from headrace_kv.prefix.events import Tier
from headrace_kv.prefix.hashing import CHECKPOINT_BLOCKS


@dataclass(slots=True)
class _Known:
    """A block that was told of, and in how many tiers it is."""

    name: int
    parent: int | None
    tiers: int = 0


class Announcements:
    """What one pool has made findable, told to `events` from the moment on at which they have begun."""

    def __init__(self, events: PrefixAnnouncer) -> None:
        self._events = events
        # By the engine's own hash of a prefix.
        self._known: dict[int, _Known] = {}

    def stored(self, sequence: Sequence, indices: Items[int]) -> None:
        """These of the sequence's blocks, ascending, have become findable."""
        if not indices or self._events.hasher is None:
            return
        size = self._events.block_tokens
        names = sequence.block_names
        start = len(names) - len(names) % CHECKPOINT_BLOCKS
        tokens = sequence.tokens[start * size : (indices[-1] + 1) * size]
        names[start:] = self._events.hasher.hashes(tokens, names[start - 1] if start else None)
        for index in indices:
            prefix = int(sequence.hashes[(index + 1) * size - 1])
            parent = names[index - 1] if index else None
            known = self._known.setdefault(prefix, _Known(names[index], parent))
            known.tiers += 1
            self._events.stored(parent, [known.name])

    def kept(self, prefixes: Items[int]) -> None:
        """Blocks of these prefixes, which are findable, are in main memory too."""
        for prefix in prefixes:
            known = self._known.get(prefix)
            if known is not None:
                known.tiers += 1
                self._events.stored(known.parent, [known.name], Tier.HOST)

    def forgotten(self, prefixes: Items[int], tier: Tier = Tier.DEVICE) -> None:
        """Blocks of these prefixes are findable in that tier no more."""
        gone: list[int] = []
        for prefix in prefixes:
            known = self._known.get(prefix)
            if known is None:
                continue
            gone.append(known.name)
            known.tiers -= 1
            if not known.tiers:
                del self._known[prefix]
        self._events.removed(gone, tier)
