"""The prefix cache of a simulated worker: whole blocks, the least recently used leave first.

Its changes become events of a real PrefixEventLog, as those of an engine do.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from headrace_engine.prefix_event_log import PrefixEventLog
from headrace_kv.layout.layout import WorkerRef
from headrace_kv.prefix.events import KvEvent, Tier


class WorkerCache:
    """The blocks in KV memory, and with `host_blocks` those that it has evicted to main memory.

    `announce` gets every event. A block leaves before its parent, because a use of a block is one of its parents too.
    """

    def __init__(
        self,
        ref: WorkerRef,
        device_blocks: int,
        host_blocks: int,
        announce: Callable[[KvEvent], object],
    ) -> None:
        self._device_blocks = device_blocks
        self._host_blocks = host_blocks
        self._announce = announce
        # Blocks and their parents, the least recently used first.
        self._device: OrderedDict[int, int | None] = OrderedDict()
        self._host: OrderedDict[int, int | None] = OrderedDict()
        tiers = (Tier.DEVICE, Tier.HOST) if host_blocks else (Tier.DEVICE,)
        self._log = PrefixEventLog(ref.incarnation, tiers)
        self._send(self._log.snapshot())

    def __len__(self) -> int:
        return len(self._device)

    def depths(self, hashes: Sequence[int]) -> tuple[int, int]:
        """How many blocks of a prompt, from the first on, are in KV memory, and in any tier."""
        device = 0
        while device < len(hashes) and hashes[device] in self._device:
            device += 1
        reached = device
        while reached < len(hashes) and (
            hashes[reached] in self._device or hashes[reached] in self._host
        ):
            reached += 1
        return device, reached

    def use(self, hashes: Sequence[int]) -> None:
        """All blocks of a prompt are in KV memory now."""
        if not hashes:
            return
        device, _ = self.depths(hashes)
        fresh = hashes[device:]
        parents: list[int | None] = [None, *hashes[:-1]]
        for block, parent in zip(fresh, parents[device:], strict=True):
            self._device[block] = parent
        for block in reversed(hashes):
            self._device.move_to_end(block)
            if block in self._host:
                self._host.move_to_end(block)
        if fresh:
            self._send(self._log.stored(parents[device], fresh))
        self._evict()

    def resize(self, device_blocks: int) -> None:
        """KV memory has room for so many blocks of prompts now."""
        self._device_blocks = max(0, device_blocks)
        self._evict()

    def _evict(self) -> None:
        evicted = [
            self._device.popitem(last=False)
            for _ in range(max(0, len(self._device) - self._device_blocks))
        ]
        if not evicted:
            return
        if self._host_blocks:
            for block, parent in evicted:
                self._host[block] = parent
                self._host.move_to_end(block)
            chains = [(parent, [block]) for block, parent in reversed(evicted)]
            self._send(self._log.stored_chains(chains, Tier.HOST))
        self._send(self._log.removed([block for block, _ in evicted]))
        if excess := len(self._host) - self._host_blocks:
            dropped = [self._host.popitem(last=False)[0] for _ in range(max(0, excess))]
            self._send(self._log.removed(dropped, Tier.HOST))

    def _send(self, events: Sequence[KvEvent]) -> None:
        for event in events:
            self._announce(event)
