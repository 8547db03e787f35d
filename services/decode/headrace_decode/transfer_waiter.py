"""Waits for the transfer that fills an attempt's blocks, and informs the engine."""

from __future__ import annotations

import asyncio
import logging

from headrace_common.deadlines import Deadline
from headrace_common.errors import HeadraceError, InternalError
from headrace_decode.engine_events import EngineEvents
from headrace_decode.timestamps import RequestTimestamps
from headrace_engine.interface import Arrived, Engine, FirstHiddenState
from headrace_kv.receive.receiver import IncomingTransfer, TransferSummary

log = logging.getLogger(__name__)

SETTLE_TIMEOUT_S = 5.0


class TransferWaiter:
    """One transfer, from its reservation on.

    Either `wait_complete` or `start_forwarding` is called once, and `wait_ended` at the end.
    `summary` is set once every expected key is counted and the engine is informed.
    """

    def __init__(
        self, transfer: IncomingTransfer, engine: Engine, timestamps: RequestTimestamps
    ) -> None:
        self.summary: TransferSummary | None = None
        self._transfer = transfer
        self._engine = engine
        self._timestamps = timestamps
        self._forwarding: asyncio.Task[None] | None = None
        self._arrival = asyncio.create_task(
            transfer.wait(), name=f"transfer {transfer.transfer_id}"
        )

    @property
    def error(self) -> HeadraceError | None:
        """The error that failed the transfer."""
        return self._transfer.error

    def require_complete(self) -> None:
        """Raises InternalError when the engine has used an incomplete KV cache (I3)."""
        if self._transfer.active:
            raise InternalError("the engine generated before the KV cache was complete")

    async def wait_complete(self, events: EngineEvents, deadline: Deadline) -> None:
        """Waits until every expected key is counted, and only then lets the engine run (I3)."""
        readable = asyncio.create_task(events.wait_readable())
        try:
            await asyncio.wait({self._arrival, readable}, return_when=asyncio.FIRST_COMPLETED)
            if readable.done() and self._transfer.active:
                # The only valid event is an error of the engine, which `read` raises.
                await events.read(deadline)
                self.require_complete()
        finally:
            readable.cancel()
        # The transfer's own error is more precise than the engine's, which may come first.
        self._complete(await self._arrival)

    def start_forwarding(self, events: EngineEvents) -> None:
        """Gives the engine the hidden state, and later the complete KV cache, while its events are read."""
        self._forwarding = asyncio.create_task(
            self._forward(events), name=f"hidden state and KV of {self._transfer.transfer_id}"
        )

    async def _forward(self, events: EngineEvents) -> None:
        try:
            state = await self._transfer.hidden_state()
            self._timestamps.hidden_state_arrived()
            self._engine.transfer_event(FirstHiddenState(self._transfer.transfer_id, state))
            await asyncio.wait({self._arrival})
            self._complete(self._arrival.result())
        except HeadraceError as error:
            events.interrupt(error)

    def _complete(self, summary: TransferSummary) -> None:
        self.summary = summary
        self._timestamps.kv_arrived()
        self._engine.transfer_event(Arrived(self._transfer.transfer_id))

    async def stop_forwarding(self) -> None:
        """Informs the engine no more, until `wait_ended`."""
        if self._forwarding is not None:
            self._forwarding.cancel()
            await asyncio.wait({self._forwarding})

    async def wait_ended(self) -> None:
        """Returns when the transfer is complete or has failed; the caller has cancelled an incomplete one."""
        if self.summary is not None:
            return
        await asyncio.wait({self._arrival}, timeout=SETTLE_TIMEOUT_S)
        if not self._arrival.done():
            name = self._transfer.transfer_id
            log.error("transfer %s did not end within %g s of its cancel", name, SETTLE_TIMEOUT_S)
            self._arrival.cancel()
        elif not self._arrival.cancelled() and self._arrival.exception() is None:
            # It was completed while the request was cancelled, so the receiver will not release the blocks.
            self._engine.transfer_event(Arrived(self._transfer.transfer_id))
