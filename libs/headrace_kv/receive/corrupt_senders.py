"""Prefill workers whose KV arrived corrupt too often."""

from __future__ import annotations

import logging
from collections import OrderedDict

from headrace_common.errors import TransferFailed
from headrace_kv.layout.layout import WorkerRef

_log = logging.getLogger(__name__)

_DISTRUSTED_LIMIT = 1024


class CorruptSenderTracker:
    """Prefill workers of which `limit` transfers arrived broken."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._counts: OrderedDict[WorkerRef, int] = OrderedDict()

    @property
    def refs(self) -> tuple[WorkerRef, ...]:
        """Those that are distrusted."""
        return tuple(ref for ref, count in self._counts.items() if count >= self._limit)

    def note(self, ref: WorkerRef) -> None:
        """One more of its transfers is broken."""
        count = self._counts[ref] = self._counts.pop(ref, 0) + 1
        if count == self._limit:
            _log.error("nothing is taken from %s any more: too much of it arrived broken", ref)
        if len(self._counts) > _DISTRUSTED_LIMIT:
            self._counts.popitem(last=False)

    def check(self, ref: WorkerRef) -> None:
        """Raises TransferFailed for a worker that is distrusted: another one can send."""
        if self._counts.get(ref, 0) >= self._limit:
            raise TransferFailed(
                f"too much that {ref} sent here arrived broken", metadata={"prefill": str(ref)}
            )
