"""How optional features take part in receiving without a place in its core.

A feature makes one observer for each transfer. An observer may delay completion (I3) and the release of blocks (I1).
Everything here is called on the receiver's event loop and must not block.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from enum import Enum
from typing import Final, Protocol, TypeVar

from headrace.kv.v1 import handoff_pb2
from headrace_common.deadlines import Deadline
from headrace_common.errors import HeadraceError, InternalError
from headrace_kv.layout import WorkerRef
from headrace_kv.messages import Reservation
from headrace_kv.receive.ledger import LayerLanded
from headrace_kv.shard_map import Key

_log = logging.getLogger(__name__)


class TransferState(Enum):
    """A transfer's blocks belong to it until FREE."""

    RESERVED = "reserved"
    OPEN = "open"
    RECEIVING = "receiving"
    COMPLETE = "complete"
    FAILED = "failed"
    DRAINING = "draining"
    FREE = "free"


_S = TransferState
NEXT_STATES: Final[dict[TransferState, frozenset[TransferState]]] = {
    _S.RESERVED: frozenset({_S.OPEN, _S.FAILED}),
    _S.OPEN: frozenset({_S.RECEIVING, _S.FAILED}),
    _S.RECEIVING: frozenset({_S.COMPLETE, _S.FAILED}),
    _S.COMPLETE: frozenset({_S.FREE}),
    _S.FAILED: frozenset({_S.DRAINING}),
    _S.DRAINING: frozenset({_S.FREE}),
    _S.FREE: frozenset(),
}
ACTIVE_STATES: Final = frozenset({_S.RESERVED, _S.OPEN, _S.RECEIVING})


class StateMachine:
    """One transfer's states. `transitions` holds each with the Unix time of its entry in nanoseconds."""

    def __init__(self, transfer_id: str, unix_ns: Callable[[], int] = time.time_ns) -> None:
        self._transfer_id = transfer_id
        self._unix_ns = unix_ns
        self._state = TransferState.RESERVED
        self._transitions = [(self._state, unix_ns())]

    @property
    def state(self) -> TransferState:
        return self._state

    @property
    def transitions(self) -> tuple[tuple[TransferState, int], ...]:
        return tuple(self._transitions)

    def entered_unix_ns(self, state: TransferState) -> int:
        """When a state was entered, 0 if it was not entered."""
        return next((unix_ns for entered, unix_ns in self._transitions if entered is state), 0)

    def enter(self, state: TransferState) -> None:
        """Raises InternalError, and changes nothing, when `state` does not follow."""
        if state not in NEXT_STATES[self._state]:
            raise InternalError(
                f"transfer {self._transfer_id} cannot go from {self._state.value} to {state.value}",
                metadata={
                    "transfer_id": self._transfer_id,
                    "from": self._state.value,
                    "to": state.value,
                },
            )
        _log.debug("transfer %s: %s -> %s", self._transfer_id, self._state.value, state.value)
        self._state = state
        self._transitions.append((state, self._unix_ns()))


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
        """Something of the active transfer has landed, or its background work has ended: more of it may start.

        Raises the error that fails the transfer.
        """

    def on_failed(self) -> None:
        """The transfer has failed: its background work must stop."""


class ReceiverFeature:
    """An optional part of a receiver. The defaults do nothing."""

    fills_local_ranks = False
    """Whether it copies between the decode ranks of one host, as KvLayout.broadcast_width requires."""

    @property
    def rejected_senders(self) -> Mapping[WorkerRef, str]:
        """Prefill workers that may not write here any more, and why."""
        return {}

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
