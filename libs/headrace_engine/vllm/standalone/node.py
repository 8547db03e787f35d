"""The node of a stock vLLM server: it serves Fetch and handoffs, and fetches KV for reserved blocks."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import shutil
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc.aio

from headrace.engine.v1 import link_pb2
from headrace.kv.v1 import handoff_pb2_grpc, pair_pb2, pair_pb2_grpc
from headrace_common.errors import Cancelled, ConfigError, HeadraceError, InternalError
from headrace_common.identity import new_incarnation
from headrace_common.rpc.channel import open_channel
from headrace_common.rpc.server import GrpcServer
from headrace_engine.kv_fetch import fetch_kv
from headrace_engine.vllm.link.client import LinkLoop
from headrace_engine.vllm.link.messages import report_from_proto
from headrace_engine.vllm.link.server import LinkServer
from headrace_engine.vllm.settings import ConnectorSettings
from headrace_engine.vllm.standalone.fetch_service import (
    DecodeMemories,
    FetchService,
    PendingFetches,
)
from headrace_engine.vllm.standalone.params import ConsumerParams
from headrace_engine.vllm.standalone.settings import StandaloneSettings
from headrace_kv.layout import STATE, KvLayout, WorkerRef, descriptor_to_proto
from headrace_kv.messages import Reservation
from headrace_kv.receive.receiver import IncomingTransfer, Receiver, TransferSummary
from headrace_kv.receive.service import HandoffServicer
from headrace_kv.tickets import NoTickets

log = logging.getLogger(__name__)

SERVICES = ("headrace.kv.v1.HandoffService", "headrace.kv.v1.PairService")
ATTACH_TIMEOUT_S = 60.0
START_TIMEOUT_S = 75.0
CLOSE_TIMEOUT_S = 5.0
DECLINE_TIMEOUT_S = 5.0
# Prefill's ranks report after their last byte has landed. Until then, cancelling the Fetch would stop ended transfers.
FETCH_END_S = 5.0


@dataclass(frozen=True, slots=True)
class FetchPlan:
    """Blocks that wait for a prompt's KV cache, and the engine to fetch it from."""

    reservation: Reservation
    params: ConsumerParams
    prompt_digest: int


class StandaloneNode:
    """The scheduling thread calls its public methods. They run on the process's link loop, and only `start` and
    `close` block.
    """

    def __init__(
        self, connector: ConnectorSettings, settings: StandaloneSettings, rank_count: int
    ) -> None:
        self._settings = settings
        self._rank_count = rank_count
        self._loop = LinkLoop.of_process().loop
        self._link_path = Path(connector.link_path)
        # Each start is another incarnation, also where vLLM keeps its engine_id over restarts.
        self.ref = WorkerRef(connector.worker_id, new_incarnation())
        self.pending_fetches = PendingFetches()
        self._memories = DecodeMemories()
        self._link = LinkServer(
            self._link_path,
            # The scheduler is in this process, so its reservations do not come over the link. vLLM itself detects that
            # a rank has ended, and ends the engine.
            self._message_received,
            log.error,
            self._memories.find,
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self._endpoint = ""
        self._server: GrpcServer
        self._receiver: Receiver
        self._fetch_service: FetchService
        self._on_whole: Callable[[Reservation, TransferSummary], None]
        self._on_failed: Callable[[str], None]

    def start(
        self,
        on_whole: Callable[[Reservation, TransferSummary], None],
        on_failed: Callable[[str], None],
    ) -> str:
        """Waits for all ranks, then serves. Returns the address under which others reach it.

        The loop calls `on_whole` when a transfer's KV cache has arrived. It calls `on_failed` when that will not arrive
        and no sender writes it any more. They must not block.

        Raises ConfigError for an address that cannot be bound, or InternalError on a timeout.
        """
        self._on_whole, self._on_failed = on_whole, on_failed
        starting = asyncio.run_coroutine_threadsafe(self._start(), self._loop)
        try:
            starting.result(START_TIMEOUT_S)
        except concurrent.futures.TimeoutError:
            starting.cancel()
            raise InternalError(
                f"the pair service did not start within {START_TIMEOUT_S:g} s"
            ) from None
        finally:
            # Ranks attach once, and vLLM is often killed before it could remove the folder.
            shutil.rmtree(self._link_path.parent, ignore_errors=True)
        log.info("%s pairs at %s", self.ref, self._endpoint)
        return self._endpoint

    async def _start(self) -> None:
        await self._link.start()
        descriptor = await self._link.wait_attached(
            self._rank_count, ATTACH_TIMEOUT_S, with_scheduler=False
        )
        require_all_tokens(descriptor.layout)
        self._descriptor = descriptor_to_proto(descriptor)
        self._receiver = Receiver(
            ref=self.ref,
            layout=descriptor.layout,
            tickets=NoTickets(),
            on_released=self._on_failed,
            lease_ttl_s=self._settings.lease_ttl_s,
            quarantine_s=self._settings.quarantine_s,
        )
        self._fetch_service = FetchService(
            ref=self.ref,
            rank_count=self._rank_count,
            pending=self.pending_fetches,
            memories=self._memories,
            stop=self._stop,
            timeout_s=self._settings.transfer_timeout_s,
        )
        self._server = GrpcServer(self._settings.server, SERVICES)
        grpc_server = self._server.server
        pair_pb2_grpc.add_PairServiceServicer_to_server(self._fetch_service, grpc_server)
        handoff_pb2_grpc.add_HandoffServiceServicer_to_server(
            HandoffServicer(self._receiver), grpc_server
        )
        self._endpoint = await self._server.start()

    def start_fetch(self, plan: FetchPlan) -> None:
        """Peers may write into the reserved blocks from now on. An empty reservation is declined."""
        self._loop.call_soon_threadsafe(self._start_fetch, plan)

    def cancel_fetch(self, transfer_id: str) -> None:
        """The request has ended. Changes nothing for a transfer that is whole or has failed."""
        self._loop.call_soon_threadsafe(
            self._receiver.cancel, transfer_id, Cancelled.reason, "the request has ended"
        )

    def fail_fetch(self, transfer_id: str, error: HeadraceError) -> None:
        """The prompt that another engine fetches is not going to be sent."""
        self._loop.call_soon_threadsafe(self._fetch_service.fail, transfer_id, error)

    def _message_received(self, rank: int, message: link_pb2.AttachRequest) -> None:
        if message.HasField("report"):
            self._fetch_service.transfer_quiet(report_from_proto(message.report))

    def _stop(self, transfer_id: str) -> None:
        stop = link_pb2.Stop(transfer_id=transfer_id)
        self._link.send_to_ranks(link_pb2.AttachResponse(stop=stop))

    def _start_fetch(self, plan: FetchPlan) -> None:
        reservation = plan.reservation
        running: Coroutine[Any, Any, None]
        if reservation.start_token == reservation.end_token:
            running = self._decline(plan)
        else:
            try:
                transfer = self._receiver.reserve(reservation, plan.params.deadline)
            except HeadraceError as exc:
                log.error("transfer %s was rejected: %s", reservation.transfer_id, exc.detail)
                self._on_failed(reservation.transfer_id)
                return
            running = self._receive(plan, transfer)
        task = asyncio.create_task(running)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _receive(self, plan: FetchPlan, transfer: IncomingTransfer) -> None:
        transfer_id, pair_address = transfer.transfer_id, plan.params.pair_address
        try:
            summary = await fetch_kv(
                self._receiver,
                transfer,
                self._fetch(plan, plan.params.deadline.remaining_s()),
                partial(self._on_whole, plan.reservation),
                FETCH_END_S,
            )
            log.info(
                "transfer %s: tokens %d to %d, %d bytes from %s",
                transfer_id,
                plan.reservation.start_token,
                plan.reservation.end_token,
                summary.payload_bytes,
                pair_address,
            )
        except HeadraceError as exc:
            log.warning("transfer %s from %s: %s", transfer_id, pair_address, exc.detail)

    async def _decline(self, plan: FetchPlan) -> None:
        """Reports to prefill that decode needs no tokens, so that the prompt does not wait for a Fetch."""
        try:
            await self._fetch(plan, DECLINE_TIMEOUT_S)
        except grpc.aio.AioRpcError as exc:
            log.info("%s: %s", plan.reservation.transfer_id, exc.details())

    async def _fetch(self, plan: FetchPlan, timeout_s: float) -> None:
        reservation = plan.reservation
        async with open_channel(plan.params.pair_address) as channel:
            await pair_pb2_grpc.PairServiceStub(channel).Fetch(
                pair_pb2.FetchRequest(
                    transfer_id=reservation.transfer_id,
                    worker_id=self.ref.worker_id,
                    incarnation=self.ref.incarnation,
                    handoff_endpoint=self._endpoint,
                    start_token=reservation.start_token,
                    end_token=reservation.end_token,
                    prompt_digest=plan.prompt_digest,
                    source_incarnation=plan.params.incarnation,
                    descriptor=self._descriptor,
                ),
                timeout=timeout_s,
            )

    def close(self) -> None:
        """Ends every transfer and stops serving."""
        ending = asyncio.run_coroutine_threadsafe(self._close(), self._loop)
        try:
            ending.result(CLOSE_TIMEOUT_S)
        except concurrent.futures.TimeoutError:
            log.error("the pair service did not end within %g s", CLOSE_TIMEOUT_S)

    async def _close(self) -> None:
        self._link.begin_close()
        self._fetch_service.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._receiver.close()
        await self._server.server.stop(None)
        await self._link.close()


def require_all_tokens(layout: KvLayout) -> None:
    """Raises ConfigError for a layout with states or windows.

    A stock prefill server also computes the last token, which advances the state beyond the one that decode needs. It
    holds a finished request for decode servers that may need blocks which a window has left.
    """
    named = [group.name for group in layout.groups if group.kind == STATE or group.is_windowed]
    if named:
        raise ConfigError(
            f"the model keeps states or windows ({', '.join(named)}), which stock servers cannot hand over: "
            "use Headrace's services",
            metadata={"field": "model", "groups": ", ".join(named)},
        )
