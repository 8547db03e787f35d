"""Waits for the transfer that fills an attempt's blocks, and informs the engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from headrace_common.errors import HeadraceError, InternalError
from headrace_common.tasks import end_task, wait_briefly
from headrace_decode.timestamps import RequestTimestamps
from headrace_engine.interface import Arrived, Engine, FirstHiddenState, LayersArrived
from headrace_engine.kv_fetch import ALL_LAYERS, late_layers_s
from headrace_kv.receive.receiver import IncomingTransfer, TransferSummary

log = logging.getLogger(__name__)

SETTLE_TIMEOUT_S = 5.0


@dataclass(eq=False)
class TransferWaiter:
    """One transfer, from its reservation on. `stop` and then `wait_ended` are called at the end.

    `summary` is set once every expected key is counted and the engine is informed: only then it may run (I3).
    """

    transfer: IncomingTransfer
    engine: Engine
    timestamps: RequestTimestamps
    on_failed: Callable[[Exception], None]
    """Gets the transfer's error."""
    forwards_state: bool
    """Whether the engine gets its hidden state too."""
    on_arrived: Callable[[], None]
    """Called when the engine is informed, while nothing else has changed the blocks."""
    on_late: Callable[[], None] | None = None
    """For a work with `computes_from`: must end the transfer, because its layers are late."""
    summary: TransferSummary | None = field(default=None, init=False)
    _late: asyncio.TimerHandle | None = field(default=None, init=False)
    _stopped: bool = field(default=False, init=False)
    _forwarding: asyncio.Task[None] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        loop, name = asyncio.get_running_loop(), self.transfer.transfer_id
        on_layers = None if self.on_late is None else self._layers_arrived
        # Not within the receiver's call.
        self.transfer.notify(on_layers, lambda outcome: loop.call_soon(self._ended, outcome))
        if self.forwards_state:
            self._forwarding = asyncio.create_task(self._forward_state(), name=f"state of {name}")

    @property
    def error(self) -> HeadraceError | None:
        """The error that failed the transfer."""
        return self.transfer.error

    def require_complete(self) -> None:
        """Raises InternalError when the engine has used an incomplete KV cache (I3)."""
        if self.transfer.active:
            raise InternalError("the engine generated before the KV cache was complete")

    async def _forward_state(self) -> None:
        with suppress(HeadraceError):
            state = await self.transfer.hidden_state()
            self.timestamps.hidden_state_arrived()
            self.engine.transfer_event(FirstHiddenState(self.transfer.transfer_id, state))

    def _layers_arrived(self, layer_count: int) -> None:
        """More of the first layers are whole. From the first one on, a step of the engine may wait for the others."""
        if self._stopped:
            return
        if self._late is None and self.on_late is not None:
            bound_s = late_layers_s(self.engine.step_times, self.transfer.reservation.end_token)
            self._late = asyncio.get_running_loop().call_later(bound_s, self.on_late)
        self.engine.transfer_event(LayersArrived(self.transfer.transfer_id, layer_count))

    def _ended(self, outcome: TransferSummary | HeadraceError) -> None:
        if self._stopped:
            return
        if isinstance(outcome, HeadraceError):
            self.on_failed(outcome)
            return
        self.summary = outcome
        if self._late is not None:
            self._late.cancel()
        self.timestamps.kv_arrived()
        try:
            self.on_arrived()
        finally:
            self.engine.transfer_event(Arrived(self.transfer.transfer_id))

    async def stop(self) -> None:
        """Informs the engine no more, until `wait_ended`. Its steps wait for no layer."""
        self._stopped = True
        if self._late is not None:
            self._late.cancel()
            if self.summary is None:
                self.engine.transfer_event(LayersArrived(self.transfer.transfer_id, ALL_LAYERS))
        await end_task(self._forwarding)

    async def wait_ended(self) -> None:
        """Returns when the transfer is complete or has failed; the caller has cancelled an incomplete one."""
        if self.summary is not None:
            return
        transfer_id = self.transfer.transfer_id
        with suppress(HeadraceError):
            await wait_briefly(self.transfer.wait(), SETTLE_TIMEOUT_S)
            if self.transfer.active:
                what = "transfer %s did not end within %g s of its cancel"
                log.error(what, transfer_id, SETTLE_TIMEOUT_S)
            else:
                # It was completed while the request was cancelled, so the receiver will not release the blocks.
                self.engine.transfer_event(Arrived(transfer_id))
