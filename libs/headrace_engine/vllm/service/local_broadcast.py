"""Local broadcast among vLLM's ranks, which are processes of their own. Uses no vLLM types."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from headrace_common.errors import TransferFailed
from headrace_kv.layout.layout import KvDescriptor
from headrace_kv.receive.local_broadcast import LocalBroadcast
from headrace_kv.transport.same_host.rank_copies import RankCopies

log = logging.getLogger(__name__)


class RankBroadcast(LocalBroadcast):
    """A LocalBroadcast that owns its access to the ranks' processes."""

    def __init__(self, descriptor: KvDescriptor, copies: RankCopies) -> None:
        super().__init__(descriptor, copies)
        self._copies = copies

    def close(self) -> None:
        super().close()
        self._copies.close()


def open_broadcast(
    descriptor: KvDescriptor, process_of: Callable[[int], int]
) -> tuple[KvDescriptor, RankBroadcast | None]:
    """The descriptor for prefill workers, and what copies among the ranks.

    Without a broadcast the descriptor stays as it is: no two ranks hold the same heads, or this process cannot reach
    their memory. `process_of` gives the process of a rank, 0 where its memory is not host memory.
    """
    layout = descriptor.layout
    ranks = layout.tensor_parallel_size
    process_ids = {memory.rank: process_of(memory.rank) for memory in descriptor.ranks}
    if all(group.head_count >= ranks for group in layout.groups) or not all(process_ids.values()):
        return descriptor, None
    try:
        copies = RankCopies(process_ids, descriptor.ranks)
    except TransferFailed as error:
        log.warning("each rank receives its own bytes over the network: %s", error.detail)
        return descriptor, None
    wide = replace(descriptor, layout=replace(layout, broadcast_width=ranks))
    return wide, RankBroadcast(wide, copies)
