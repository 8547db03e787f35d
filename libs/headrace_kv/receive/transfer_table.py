"""The transfers into one decode worker until their blocks are released.

Runs on one event loop; nothing here blocks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, field

from headrace_common.deadlines import Deadline
from headrace_common.errors import HeadraceError, ProtocolViolation, TransferTimeout
from headrace_common.process.events import EVENTS
from headrace_common.tasks import Recent
from headrace_kv.leases import QuarantinePolicy, TimerHandle, Timers, running_timers
from headrace_kv.receive.local_broadcast import LocalCopies
from headrace_kv.receive.transfer import IncomingTransfer, PrefillPeer, TransferState
from headrace_kv.receive.verification import RangeChecks

_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class IncomingTransfers:
    """Advances transfers, fails them, and releases their blocks once nothing writes into them (I1).

    `on_released(transfer_id)` is called once for each failed transfer, when its blocks may be reused. Ended transfers
    are remembered in `ended` with the reason, so that late messages are recognised.
    """

    on_released: Callable[[str], None]
    policy: QuarantinePolicy
    _: KW_ONLY
    quiesce_timeout_s: float
    ended: Recent[str, str]
    timers: Timers | None = None
    failed: set[IncomingTransfer] = field(default_factory=set, init=False)
    """Those of which the blocks are not released. All others may still complete."""
    _transfers: dict[str, IncomingTransfer] = field(default_factory=dict, init=False)
    _tick_handle: TimerHandle | None = field(default=None, init=False)
    _closed: bool = field(default=False, init=False)
    _changed: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    def __iter__(self) -> Iterator[IncomingTransfer]:
        """A snapshot: transfers may end while it is read."""
        return iter(tuple(self._transfers.values()))

    def get(self, transfer_id: str) -> IncomingTransfer | None:
        """A transfer until its blocks are released."""
        return self._transfers.get(transfer_id)

    def add(
        self, transfer: IncomingTransfer, copies: LocalCopies | None, checks: RangeChecks | None
    ) -> None:
        """Starts a transfer with its deadline."""
        self._transfers[transfer.transfer_id] = transfer
        transfer.start(running_timers(self.timers), self._time_out, copies, checks)

    def advance(self, transfer: IncomingTransfer) -> None:
        """Completes a transfer that is whole. Raises the error that fails it."""
        if transfer.whole:
            transfer.complete()
            self._remove(transfer)
        transfer.start_jobs()

    def fail(self, transfer: IncomingTransfer, error: HeadraceError) -> None:
        """Ends a transfer that is not complete; no effect on others."""
        if not transfer.active:
            return
        _log.info("transfer %s failed: %s", transfer.transfer_id, error.detail)
        self.failed.add(transfer)
        transfer.fail(error, self._now_s())
        for peer in tuple(transfer.writers):
            peer.refuse(transfer.transfer_id, error.reason, error.detail)
        self._release_if_quiesced(transfer)
        self._start_ticks()

    def remove_writer(self, transfer: IncomingTransfer, peer: PrefillPeer) -> None:
        """A rank writes no more for a transfer."""
        transfer.remove_writer(peer)
        self._release_if_quiesced(transfer)

    def quarantine_writer(self, transfer: IncomingTransfer, peer: PrefillPeer) -> None:
        """A rank's stream has ended: its writes end with its lease and the transport's timeout."""
        transfer.remove_writer(peer)
        EVENTS.alarm(f"the blocks of transfer {transfer.transfer_id} are in quarantine")
        transfer.start_quarantine(self.policy, self._now_s())
        self._start_ticks()

    def resume(
        self,
        transfer: IncomingTransfer,
        error: HeadraceError | None,
        *,
        late_write_s: float = 0.0,
    ) -> None:
        """Continues after local copies or checks of a transfer have ended. `error` fails it.

        Copies that have failed may still write into the blocks for `late_write_s`.
        """
        if late_write_s:
            transfer.start_quarantine(QuarantinePolicy(0.0, late_write_s), self._now_s())
        if transfer.active and error is None:
            try:
                self.advance(transfer)
            except HeadraceError as refusal:
                error = refusal
        if error is not None:
            self.fail(transfer, error)
        if not self._closed:
            self._release_if_quiesced(transfer)

    def remember_ended(self, transfer_id: str, detail: str) -> None:
        """Records why a transfer is over."""
        self.ended[transfer_id] = detail

    async def wait_empty(self, deadline: Deadline) -> None:
        """Returns when the blocks of every transfer are released, or at the deadline."""
        while self._transfers and not deadline.expired:
            self._changed.clear()
            try:
                async with asyncio.timeout(deadline.remaining_s()):
                    await self._changed.wait()
            except TimeoutError:
                return

    def close(self, error: HeadraceError) -> None:
        """Fails what is active and stops the clock. The blocks of failed transfers are never released."""
        self._closed = True
        for transfer in self:
            if transfer.active:
                self.failed.add(transfer)
                transfer.fail(error, self._now_s())
        if self._tick_handle is not None:
            self._tick_handle.cancel()
            self._tick_handle = None

    def _time_out(self, transfer: IncomingTransfer) -> None:
        missing = transfer.missing()
        error = TransferTimeout(
            f"transfer {transfer.transfer_id} is not whole in time; missing are {missing}",
            metadata={"transfer_id": transfer.transfer_id, "missing": missing},
        )
        self.fail(transfer, error)

    def _release_if_quiesced(self, transfer: IncomingTransfer) -> None:
        if transfer.state is TransferState.DRAINING and transfer.quiesced:
            self._remove(transfer)
            self.on_released(transfer.transfer_id)

    def _remove(self, transfer: IncomingTransfer) -> None:
        transfer.free()
        self.failed.discard(transfer)
        del self._transfers[transfer.transfer_id]
        self.remember_ended(transfer.transfer_id, "the transfer has ended")
        self._changed.set()

    def _start_ticks(self) -> None:
        """Keeps the clock running while a failed transfer has not quiesced."""
        if self.failed and self._tick_handle is None and not self._closed:
            timers = running_timers(self.timers)
            self._tick_handle = timers.call_later(self.policy.tick_s, self._tick)

    def _tick(self) -> None:
        self._tick_handle = None
        now_s = self._now_s()
        for transfer in tuple(self.failed):
            transfer.advance_quarantines(now_s)
            self._release_if_quiesced(transfer)
            if now_s - transfer.failed_s > self.quiesce_timeout_s:
                for peer in tuple(transfer.writers):
                    peer.end(
                        ProtocolViolation(f"{peer} did not stop {transfer.transfer_id} in time")
                    )
        self._start_ticks()

    def _now_s(self) -> float:
        return running_timers(self.timers).time()
