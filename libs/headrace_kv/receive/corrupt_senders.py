"""Prefill workers that sent corrupt KV too often."""

from __future__ import annotations

import logging
from collections import OrderedDict

from headrace_common.errors import TransferFailed
from headrace_kv.layout.layout import WorkerRef

_log = logging.getLogger(__name__)

_TRACKED_LIMIT = 1024


class CorruptSenderTracker:
    """Counts corrupt transfers by prefill worker; a worker with `limit` of them is rejected."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._counts: OrderedDict[WorkerRef, int] = OrderedDict()

    @property
    def rejected(self) -> tuple[WorkerRef, ...]:
        """The rejected workers."""
        return tuple(ref for ref, count in self._counts.items() if count >= self._limit)

    def record(self, ref: WorkerRef) -> None:
        """Counts one corrupt transfer."""
        count = self._counts[ref] = self._counts.pop(ref, 0) + 1
        if count == self._limit:
            _log.error("rejecting KV from %s: too many of its transfers arrived corrupt", ref)
        if len(self._counts) > _TRACKED_LIMIT:
            self._counts.popitem(last=False)

    def require_accepted(self, ref: WorkerRef) -> None:
        """Raises TransferFailed for a rejected worker: another one can send."""
        if self._counts.get(ref, 0) >= self._limit:
            raise TransferFailed(
                f"too many transfers from {ref} arrived corrupt here",
                metadata={"prefill": str(ref)},
            )
