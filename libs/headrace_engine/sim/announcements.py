"""Names the sim engine's findable blocks as routers do."""

from __future__ import annotations

from collections.abc import Sequence as Items

from headrace_engine.prefix_announcer import PrefixAnnouncer
from headrace_engine.sim.sequence import Sequence
from headrace_kv.prefix_hash import STATION_BLOCKS


class Announcements:
    """What one pool has made findable, told to `events` from the moment on at which they have begun."""

    def __init__(self, events: PrefixAnnouncer) -> None:
        self._events = events
        # By the engine's own hash of a prefix.
        self._name_of: dict[int, int] = {}

    def stored(self, sequence: Sequence, indices: Items[int]) -> None:
        """These of the sequence's blocks, ascending, have become findable."""
        if not indices or self._events.hasher is None:
            return
        size = self._events.block_tokens
        names = sequence.block_names
        start = len(names) - len(names) % STATION_BLOCKS
        tokens = sequence.tokens[start * size : (indices[-1] + 1) * size]
        names[start:] = self._events.hasher.hashes(tokens, names[start - 1] if start else None)
        for index in indices:
            self._name_of[int(sequence.hashes[(index + 1) * size - 1])] = names[index]
            self._events.stored(names[index - 1] if index else None, [names[index]])

    def forgotten(self, prefixes: Items[int]) -> None:
        """Blocks of these prefixes are findable no more."""
        names = (self._name_of.pop(prefix, None) for prefix in prefixes)
        self._events.removed([name for name in names if name is not None])
