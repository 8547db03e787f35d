"""How optional features take part in receiving without a place in its core.

A feature makes one observer for each transfer. An observer may delay completion (I3) and the release of blocks (I1).
Everything here is called on the receiver's event loop and must not block.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Protocol, TypeVar

from headrace.kv.v1 import handoff_pb2
from headrace_common.deadlines import Deadline
from headrace_common.errors import HeadraceError
from headrace_kv.handoff.messages import Reservation
from headrace_kv.layout.layout import WorkerRef
from headrace_kv.plan.shard_map import Key
from headrace_kv.receive.ledger import LayerLanded

_T = TypeVar("_T")


class TransferView(Protocol):
    """What an observer may read of its transfer."""

    @property
    def transfer_id(self) -> str:
        """See Reservation."""

    @property
    def reservation(self) -> Reservation:
        """The blocks that are written into."""

    @property
    def deadline(self) -> Deadline:
        """When the transfer fails."""

    @property
    def prefill(self) -> WorkerRef | None:
        """The worker that sends, None before its first Open."""

    @property
    def digest_seed(self) -> int:
        """The seed of its digests, which is fixed from its first Open on."""

    @property
    def active(self) -> bool:
        """Whether it may still complete."""

    @property
    def error(self) -> HeadraceError | None:
        """Why it failed."""

    def arrived_layers(self, destination_rank: int) -> int:
        """How many layers, counted from the first, are whole on one decode rank."""


class ResumeTransfer(Protocol):
    """Continues a transfer after background work of an observer has ended."""

    def __call__(self, error: HeadraceError | None, *, late_write_s: float = 0.0) -> None:
        """`error` fails the transfer. The work may still write into the blocks for `late_write_s`."""


class TransferObserver:
    """One feature's part in one transfer. The defaults do nothing."""

    @property
    def pending_keys(self) -> Collection[Key]:
        """Keys that are not whole for this feature. The transfer completes when no observer has any (I3)."""
        return ()

    @property
    def holds_blocks(self) -> bool:
        """Whether the feature may write into the blocks, which are not released before it stops (I1)."""
        return False

    @property
    def local_bytes(self) -> int:
        """Bytes that the feature has copied into the blocks."""
        return 0

    def missing(self) -> str:
        """Names the pending keys for an error message, "" when there are none."""
        return ""

    def on_layer_landed(self, landed: LayerLanded) -> None:
        """The ledger has counted a range, duplicates excepted. Raises the error that fails the transfer."""

    def on_progress(self, transfer: TransferView) -> None:
        """Something has landed, background work has ended, or the transfer has ended.

        An active transfer may start background work here. Raises the error that fails the transfer.
        """

    def on_failed(self) -> None:
        """The transfer has failed: its background work must stop."""


class ReceiverFeature:
    """An optional part of a receiver. The defaults do nothing."""

    fills_local_ranks = False
    """Whether it copies between the decode ranks of one host, as KvLayout.broadcast_width requires."""

    @property
    def rejected_senders(self) -> tuple[WorkerRef, ...]:
        """Prefill workers that may not write here any more."""
        return ()

    def require_accepted(self, sender: WorkerRef) -> None:
        """Raises HeadraceError for a rejected sender."""

    def extend_welcome(self, welcome: handoff_pb2.Welcome) -> None:
        """Adds what prefill ranks need to the message that answers their Hello."""

    def observe(self, transfer: TransferView, resume: ResumeTransfer) -> TransferObserver:
        """The feature's part in a new transfer."""
        return TransferObserver()


def call_when_done(future: Future[_T], callback: Callable[[Future[_T]], None]) -> None:
    """Calls back on the running event loop once a thread's future is done; never after the loop has closed."""
    loop = asyncio.get_running_loop()

    def on_done(done: Future[_T]) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(callback, done)

    future.add_done_callback(on_done)
