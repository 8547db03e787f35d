"""Local broadcast among vLLM's ranks, which are processes of their own. Uses no vLLM types."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from headrace_kv.layout import KvDescriptor, RankMemory
from headrace_kv.receive.local_broadcast import WRITE_BYTES, LocalBroadcast, LocalWrite
from headrace_kv.runs import Runs
from headrace_kv.transport.mapped_memory import MappedMemory
from headrace_kv.transport.memory import Bytes

log = logging.getLogger(__name__)


def open_broadcast(
    descriptor: KvDescriptor, memories: Mapping[int, MappedMemory]
) -> tuple[KvDescriptor, LocalBroadcast | None]:
    """The descriptor for prefill workers, and what copies among the ranks.

    Without a broadcast the descriptor stays as it is: no two ranks hold the same heads, or `memories`, which are by
    rank, lack some.
    """
    layout = descriptor.layout
    ranks = layout.tensor_parallel_size
    if all(group.head_count >= ranks for group in layout.groups):
        return descriptor, None
    if len(memories) < layout.rank_count:
        log.warning(
            "each rank receives its own bytes over the network: this process maps no memory of ranks"
        )
        return descriptor, None
    wide = replace(descriptor, layout=replace(layout, broadcast_width=ranks))
    return wide, LocalBroadcast(wide, copy_between(memories))


def copy_between(memories: Mapping[int, MappedMemory]) -> LocalWrite:
    """A LocalWrite of at most WRITE_BYTES for ranks with memory that this process maps. For one thread at a time."""

    buffer: Bytes = np.empty(WRITE_BYTES, np.uint8)

    def copy(source: RankMemory, destination: RankMemory, runs: Runs, timeout_s: float) -> None:
        # Two passes of numpy take less time than a Python loop over runs in any order.
        memories[source.rank].gather(runs.source_addresses, runs.lengths, buffer)
        memories[destination.rank].scatter(buffer, runs.destination_addresses, runs.lengths)

    return copy
