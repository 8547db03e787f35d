"""The transfer that fills an attempt's blocks, and what the engine hears of it."""

from __future__ import annotations

import asyncio
import logging
import time

from headrace_common.deadlines import Deadline
from headrace_common.errors import HeadraceError, InternalError
from headrace_decode.event_buffer import EventBuffer
from headrace_decode.timestamps import RequestTimestamps
from headrace_engine.interface import Engine
from headrace_kv.receive.receiver import IncomingTransfer, TransferSummary

log = logging.getLogger(__name__)

SETTLE_TIMEOUT_S = 5.0


class TransferWaiter:
    """One transfer, from its reservation on. Either `wait_whole` or `pass_on` is called once, and `settle` at the end.

    `summary` is there once every expected key was counted, and the engine has heard of it.
    """

    def __init__(
        self, transfer: IncomingTransfer, engine: Engine, milestones: RequestTimestamps
    ) -> None:
        self.summary: TransferSummary | None = None
        self._transfer = transfer
        self._engine = engine
        self._milestones = milestones
        self._passing: asyncio.Task[None] | None = None
        self._arrival = asyncio.create_task(
            transfer.wait(), name=f"transfer {transfer.transfer_id}"
        )

    @property
    def error(self) -> HeadraceError | None:
        """Why the transfer has failed."""
        return self._transfer.error

    def require_whole(self) -> None:
        """Raises InternalError for an engine that has used KV that is not all there (I3)."""
        if self._transfer.active:
            raise InternalError("the engine generated before the KV cache was there")

    async def wait_whole(self, events: EventBuffer, deadline: Deadline) -> None:
        """Waits until every expected key is counted, and only then lets the engine run (I3)."""
        spoken = asyncio.create_task(events.spoken())
        try:
            await asyncio.wait({self._arrival, spoken}, return_when=asyncio.FIRST_COMPLETED)
            if spoken.done() and self._transfer.active:
                # Only an error of the engine is in order here; take raises it.
                await events.take(deadline)
                self.require_whole()
        finally:
            spoken.cancel()
        # An engine that hears of the failed transfer first says less about it.
        self._note_arrival(await self._arrival)

    def pass_on(self, events: EventBuffer) -> None:
        """From now on, gives the engine the logits and then word of the whole KV, while it speaks already."""
        self._passing = asyncio.create_task(
            self._pass_on(events), name=f"logits and KV of {self._transfer.transfer_id}"
        )

    async def _pass_on(self, events: EventBuffer) -> None:
        try:
            logits = await self._transfer.logits()
            self._milestones.logits_unix_ns = time.time_ns()
            self._engine.first_logits(self._transfer.transfer_id, logits)
            await asyncio.wait({self._arrival})
            self._note_arrival(self._arrival.result())
        except HeadraceError as error:
            events.interrupt(error)

    def _note_arrival(self, summary: TransferSummary) -> None:
        self.summary = summary
        self._milestones.arrived_unix_ns = time.time_ns()
        self._engine.arrived(self._transfer.transfer_id)

    async def stop_passing(self) -> None:
        """The engine hears nothing more of it, until `settle`."""
        if self._passing is not None:
            self._passing.cancel()
            await asyncio.wait({self._passing})

    async def settle(self) -> None:
        """Returns when nobody waits for the transfer any more. It has been cancelled, unless it was whole."""
        if self.summary is not None:
            return
        await asyncio.wait({self._arrival}, timeout=SETTLE_TIMEOUT_S)
        if not self._arrival.done():
            log.error(
                "transfer %s did not end within %g s of its cancel",
                self._transfer.transfer_id,
                SETTLE_TIMEOUT_S,
            )
            self._arrival.cancel()
        elif not self._arrival.cancelled() and self._arrival.exception() is None:
            # It became whole while the request was given up: the receiver's part is over.
            self._engine.arrived(self._transfer.transfer_id)
