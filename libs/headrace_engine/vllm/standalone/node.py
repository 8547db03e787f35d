"""Everything that our services are to the connector, on the event loop of vLLM's engine process."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from headrace.kv.v1 import handoff_pb2_grpc, pair_pb2_grpc
from headrace_common.deadlines import Deadline
from headrace_common.errors import ConfigError, HeadraceError, InternalError
from headrace_common.identity import new_incarnation
from headrace_common.rpc.server import GrpcServer
from headrace_engine.vllm.link.client import LinkLoop
from headrace_engine.vllm.link.server import LinkEvents, LinkServer
from headrace_engine.vllm.settings import ConnectorSettings
from headrace_engine.vllm.standalone.fetch_client import FetchClient, FetchPlan
from headrace_engine.vllm.standalone.fetch_service import DecodeMemories, FetchService
from headrace_engine.vllm.standalone.pair_scheduler import PairScheduler
from headrace_engine.vllm.standalone.pending_fetches import PendingFetches
from headrace_engine.vllm.standalone.settings import StandaloneSettings
from headrace_kv.handoff.messages import Reservation, SendReport
from headrace_kv.layout.layout import STATE, KvDescriptor, KvLayout, WorkerRef
from headrace_kv.receive.layer_overlap import LayerOverlap
from headrace_kv.receive.observer import TransferObserver
from headrace_kv.receive.receiver import Receiver, TransferSummary
from headrace_kv.receive.service import HandoffServicer

log = logging.getLogger(__name__)

SERVICES = ("headrace.kv.v1.HandoffService", "headrace.kv.v1.PairService")
ATTACH_TIMEOUT_S = 60.0
START_TIMEOUT_S = 75.0
CLOSE_TIMEOUT_S = 5.0

OnSettled = Callable[[str, bool], None]
OnArriving = Callable[[str, float], None]


class StandaloneNode:
    """Starts and ends in the thread of the scheduler, and runs on the process's link loop.

    Requests go through `scheduler`, which is there once `start` has returned.
    """

    scheduler: PairScheduler

    def __init__(
        self,
        connector: ConnectorSettings,
        settings: StandaloneSettings,
        rank_count: int,
    ) -> None:
        self._connector = connector
        self._settings = settings
        self._rank_count = rank_count
        self._loop = LinkLoop.of_process().loop
        self._link_path = Path(connector.link_path)
        # Each start is another incarnation, also where vLLM keeps its engine_id over restarts.
        self._ref = WorkerRef(connector.worker_id, new_incarnation())
        self._offers = PendingFetches()
        self._memories = DecodeMemories()
        self._link = LinkServer(
            self._link_path,
            # The scheduler is in this very process, and its reservations do not come by the link.
            LinkEvents(lambda _: None, self._reported, self._lost),
            self._memories.find,
        )
        self._on_settled: OnSettled
        self._on_arriving: OnArriving
        self._server: GrpcServer
        self._receiver: Receiver
        self._source: FetchService
        self._sink: FetchClient

    def start(self, on_settled: OnSettled, on_arriving: OnArriving) -> None:
        """Serves, once all ranks are there. Raises ConfigError for an address that cannot be listened on.

        `on_settled(transfer_id, whole)` hears, on the loop, when nothing writes for an incoming transfer any more;
        `on_arriving(transfer_id, deadline_unix_s)` when only its last layers are missing.
        """
        self._on_settled = on_settled
        self._on_arriving = on_arriving
        starting = asyncio.run_coroutine_threadsafe(self._start(), self._loop)
        try:
            endpoint = starting.result(START_TIMEOUT_S)
        except concurrent.futures.TimeoutError:
            starting.cancel()
            raise InternalError(f"pairing did not start within {START_TIMEOUT_S:g} s") from None
        finally:
            # Ranks attach once, and vLLM is often killed before it could remove anything.
            shutil.rmtree(self._link_path.parent, ignore_errors=True)
        role = self._connector.role
        self.scheduler = PairScheduler(
            ref=self._ref,
            endpoint=endpoint,
            offers=self._offers,
            peer=self,
            can_send=role != "decode",
            can_receive=role != "prefill",
            timeout_s=self._settings.transfer_timeout_s,
            kv_hold_timeout_s=self._settings.kv_hold_timeout_s,
        )
        log.info("%s pairs at %s", self._ref, endpoint)

    async def _start(self) -> str:
        await self._link.start()
        descriptor = await self._link.wait_attached(
            self._rank_count, ATTACH_TIMEOUT_S, with_scheduler=False
        )
        require_no_states(descriptor.layout)
        self._receiver = Receiver(
            ref=self._ref,
            layout=descriptor.layout,
            on_released=lambda transfer_id: self._on_settled(transfer_id, False),
            lease_ttl_s=self._settings.lease_ttl_s,
            quarantine_s=self._settings.quarantine_s,
        )
        self._source = self._make_source(descriptor)
        self._server = GrpcServer(self._settings.server, SERVICES)
        grpc_server = self._server.server
        pair_pb2_grpc.add_PairServiceServicer_to_server(self._source, grpc_server)
        handoff_pb2_grpc.add_HandoffServiceServicer_to_server(
            HandoffServicer(self._receiver), grpc_server
        )
        endpoint = await self._server.start()
        self._sink = FetchClient(
            ref=self._ref,
            endpoint=endpoint,
            receiver=self._receiver,
            on_whole=self._whole,
            on_refused=lambda transfer_id: self._on_settled(transfer_id, False),
            listen=partial(self._arrival_listener, descriptor.layout.layer_count),
        )
        return endpoint

    def _arrival_listener(self, layer_count: int) -> TransferObserver | None:
        late = self._connector.overlap_layers
        if not late.count:
            return None
        return LayerOverlap(
            self, overlap_layers=late.count, layer_count=layer_count, rank_count=self._rank_count
        )

    def arriving(self, transfer_id: str, deadline: Deadline) -> None:
        """See EarlyNews; so is the one below."""
        self._on_arriving(transfer_id, deadline.unix_s)

    def layers_arrived(
        self, transfer_id: str, rank: int, layer_count: int, *, failed: bool
    ) -> None:
        self._link.layers_arrived(transfer_id, rank, layer_count, failed=failed)

    def _make_source(self, descriptor: KvDescriptor) -> FetchService:
        return FetchService(
            ref=self._ref,
            descriptor=descriptor,
            offers=self._offers,
            memories=self._memories,
            stop=self._link.stop,
            timeout_s=self._settings.transfer_timeout_s,
        )

    def reserved(self, reservation: Reservation) -> None:
        """The scheduler holds blocks for a transfer."""
        self.scheduler.reserved(reservation)

    def _reported(self, report: SendReport) -> None:
        self._source.reported(report)

    def _whole(self, transfer_id: str, summary: TransferSummary) -> None:
        self.scheduler.note_whole(transfer_id, summary)
        self._on_settled(transfer_id, True)

    def _lost(self, why: str) -> None:
        # vLLM itself notices that a rank has ended, and ends the engine.
        log.error("%s", why)

    def begin(self, wanted: FetchPlan) -> None:
        """See PairPeer; so are the two below."""
        self._loop.call_soon_threadsafe(self._sink.begin, wanted)

    def give_up(self, transfer_id: str) -> None:
        self._loop.call_soon_threadsafe(self._sink.give_up, transfer_id)

    def fail_fetch(self, transfer_id: str, error: HeadraceError) -> None:
        self._loop.call_soon_threadsafe(self._source.fail, transfer_id, error)

    def close(self) -> None:
        """Ends every transfer and stops serving."""
        ending = asyncio.run_coroutine_threadsafe(self._close(), self._loop)
        try:
            ending.result(CLOSE_TIMEOUT_S)
        except concurrent.futures.TimeoutError:
            log.error("pairing did not end within %g s", CLOSE_TIMEOUT_S)

    async def _close(self) -> None:
        self._link.begin_close()
        self._source.close()
        await self._sink.close()
        self._receiver.close()
        await self._server.server.stop(None)
        await self._link.close()


def require_no_states(layout: KvLayout) -> None:
    """Raises ConfigError for a state: prefill's server computes the last token too, and takes the state beyond it."""
    states = [group.name for group in layout.groups if group.kind == STATE]
    if states:
        raise ConfigError(
            f"the model keeps states ({', '.join(states)}), which stock servers cannot hand over: "
            "use Headrace's services",
            metadata={"field": "model", "states": ", ".join(states)},
        )
