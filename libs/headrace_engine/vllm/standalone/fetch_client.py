"""The decode side of pairing: opens the books for reserved blocks and has them filled. Runs on one event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import grpc.aio

from headrace.kv.v1 import pair_pb2, pair_pb2_grpc
from headrace_common.errors import Cancelled, HeadraceError
from headrace_common.rpc.channel import open_channel
from headrace_common.rpc.status import error_from_rpc
from headrace_engine.vllm.standalone.params import ConsumerParams
from headrace_kv.handoff.messages import Reservation
from headrace_kv.layout.layout import WorkerRef
from headrace_kv.receive.observer import TransferObserver
from headrace_kv.receive.receiver import IncomingTransfer, Receiver, TransferSummary

log = logging.getLogger(__name__)

DECLINE_TIMEOUT_S = 5.0
# Ranks report after their last byte has landed: prefill is not told to stop what is done already.
FETCH_END_S = 5.0


@dataclass(frozen=True, slots=True)
class FetchPlan:
    """Blocks that wait for a prompt's KV cache, and where it comes from."""

    reservation: Reservation
    fetches: ConsumerParams
    prompt_digest: int


class FetchClient:
    """`on_whole` is called once for each transfer whose KV cache is there; the receiver tells of the others itself,
    and `on_refused` of those that it never took. `listen` makes what hears of a
    transfer's layers, where somebody wants to.
    """

    def __init__(
        self,
        *,
        ref: WorkerRef,
        endpoint: str,
        receiver: Receiver,
        on_whole: Callable[[str, TransferSummary], None],
        on_refused: Callable[[str], None],
        listen: Callable[[], TransferObserver | None] = lambda: None,
    ) -> None:
        self._ref = ref
        self._endpoint = endpoint
        self._receiver = receiver
        self._on_whole = on_whole
        self._on_refused = on_refused
        self._listen = listen
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, wanted: FetchPlan) -> None:
        """Blocks are held: from now on they may be written into."""
        reservation = wanted.reservation
        if reservation.start_token == reservation.end_token:
            self._spawn(self._decline(wanted))
            return
        try:
            transfer = self._receiver.reserve(
                reservation, wanted.fetches.deadline, observer=self._listen()
            )
        except HeadraceError as exc:
            log.error("transfer %s was refused: %s", reservation.transfer_id, exc.detail)
            self._on_refused(reservation.transfer_id)
            return
        self._spawn(self._fill(wanted, transfer))

    def give_up(self, transfer_id: str) -> None:
        """The request is over; a transfer that is whole, or failed, does not mind."""
        self._receiver.cancel(transfer_id, Cancelled.reason, "the request has ended")

    async def close(self) -> None:
        """Ends everything."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _fill(self, wanted: FetchPlan, transfer: IncomingTransfer) -> None:
        transfer_id = transfer.transfer_id
        arrival = asyncio.create_task(transfer.wait())
        fetch = asyncio.create_task(self._fetch(wanted, wanted.fetches.deadline.remaining_s()))
        try:
            await asyncio.wait({arrival, fetch}, return_when=asyncio.FIRST_COMPLETED)
            if fetch.done() and not arrival.done():
                error = fetch.exception()
                if isinstance(error, HeadraceError):
                    self._receiver.cancel(transfer_id, error.reason, error.detail)
            summary = await arrival
            log.info(
                "transfer %s: %d tokens, %d bytes from %s",
                transfer_id,
                wanted.reservation.end_token - wanted.reservation.start_token,
                summary.payload_bytes,
                wanted.fetches.source,
            )
            self._on_whole(transfer_id, summary)
            await asyncio.wait({fetch}, timeout=FETCH_END_S)
        except HeadraceError as exc:
            log.warning("transfer %s from %s: %s", transfer_id, wanted.fetches.source, exc.detail)
        finally:
            arrival.cancel()
            fetch.cancel()
            await asyncio.gather(fetch, return_exceptions=True)

    async def _decline(self, wanted: FetchPlan) -> None:
        """Tells prefill that nothing is wanted, so that it does not wait for this engine."""
        try:
            await self._fetch(wanted, DECLINE_TIMEOUT_S)
        except HeadraceError as exc:
            log.info("%s: %s", wanted.reservation.transfer_id, exc.detail)

    async def _fetch(self, wanted: FetchPlan, timeout_s: float) -> None:
        reservation = wanted.reservation
        try:
            async with open_channel(wanted.fetches.source) as channel:
                await pair_pb2_grpc.PairServiceStub(channel).Fetch(
                    pair_pb2.FetchRequest(
                        transfer_id=reservation.transfer_id,
                        worker_id=self._ref.worker_id,
                        incarnation=self._ref.incarnation,
                        handoff_endpoint=self._endpoint,
                        start_token=reservation.start_token,
                        end_token=reservation.end_token,
                        prompt_digest=wanted.prompt_digest,
                        source_incarnation=wanted.fetches.incarnation,
                    ),
                    timeout=timeout_s,
                )
        except grpc.aio.AioRpcError as exc:
            raise error_from_rpc(exc) from exc
