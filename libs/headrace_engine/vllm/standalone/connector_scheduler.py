"""The scheduler's half of the connector in a stock vLLM server, and the node that serves Fetch and handoffs there."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.kv.v1 import handoff_pb2_grpc, pair_pb2_grpc
from headrace_common.errors import ConfigError, HeadraceError, InternalError
from headrace_common.identity import new_incarnation
from headrace_common.registry.adapters import ADAPTERS_MAX
from headrace_common.rpc.server import GrpcServer
from headrace_engine.connector.layer_groups import LayerGroup
from headrace_engine.connector.step_plan import StepPlan
from headrace_engine.connector.step_planner import SHORT_STEP_S
from headrace_engine.connector.tier_planner import TierPlanner
from headrace_engine.vllm.link.client import LinkLoop
from headrace_engine.vllm.link.server import LinkEvents, LinkServer
from headrace_engine.vllm.model_folder import digest_of_adapter
from headrace_engine.vllm.scheduler.connector_scheduler import ConnectorScheduler
from headrace_engine.vllm.settings import ConnectorSettings
from headrace_engine.vllm.standalone.fetch_client import FetchClient, FetchPlan
from headrace_engine.vllm.standalone.fetch_service import (
    DecodeMemories,
    FetchService,
    PendingFetches,
)
from headrace_engine.vllm.standalone.pair_scheduler import PairScheduler, Prompt
from headrace_engine.vllm.standalone.settings import StandaloneSettings
from headrace_kv.layout import STATE, KvDescriptor, KvLayout, WorkerRef
from headrace_kv.manager.lower_tiers import LowerTiers
from headrace_kv.messages import Reservation, SendReport
from headrace_kv.receive.receiver import Receiver, TransferSummary
from headrace_kv.receive.service import HandoffServicer
from headrace_kv.tickets import NoTickets

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


log = logging.getLogger(__name__)

SERVICES = ("headrace.kv.v1.HandoffService", "headrace.kv.v1.PairService")
ATTACH_TIMEOUT_S = 60.0
START_TIMEOUT_S = 75.0
CLOSE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class TransferEvents:
    """Callbacks for incoming transfers. The node's loop calls them; they must not block.

    `whole`: the KV cache has arrived. `failed`: it will not arrive, and no sender writes it any more.
    """

    whole: Callable[[str, TransferSummary], None]
    failed: Callable[[str], None]


class StandaloneNode:
    """The scheduling thread calls its public methods. They run on the process's link loop."""

    def __init__(
        self,
        connector: ConnectorSettings,
        settings: StandaloneSettings,
        rank_count: int,
        events: TransferEvents,
    ) -> None:
        self._connector = connector
        self._settings = settings
        self._rank_count = rank_count
        self._events = events
        self._loop = LinkLoop.of_process().loop
        self._link_path = Path(connector.link_path)
        # Each start is another incarnation, also where vLLM keeps its engine_id over restarts.
        self.ref = WorkerRef(connector.worker_id, new_incarnation())
        self.pending_fetches = PendingFetches()
        self._memories = DecodeMemories()
        self._link = LinkServer(
            self._link_path,
            # The scheduler is in this process, so its reservations do not come over the link.
            LinkEvents(lambda _: None, self._transfer_quiet, self._rank_lost),
            self._memories.find,
        )
        self._server: GrpcServer
        self._receiver: Receiver
        self._fetch_service: FetchService
        self._fetch_client: FetchClient

    def start(self) -> str:
        """Waits for all ranks, then serves. Returns the address under which others reach it.

        Raises ConfigError for an address that cannot be bound, or InternalError on a timeout.
        """
        starting = asyncio.run_coroutine_threadsafe(self._start(), self._loop)
        try:
            endpoint = starting.result(START_TIMEOUT_S)
        except concurrent.futures.TimeoutError:
            starting.cancel()
            raise InternalError(
                f"the pair service did not start within {START_TIMEOUT_S:g} s"
            ) from None
        finally:
            # Ranks attach once, and vLLM is often killed before it could remove the folder.
            shutil.rmtree(self._link_path.parent, ignore_errors=True)
        log.info("%s pairs at %s", self.ref, endpoint)
        return endpoint

    async def _start(self) -> str:
        await self._link.start()
        descriptor = await self._link.wait_attached(
            self._rank_count, ATTACH_TIMEOUT_S, with_scheduler=False
        )
        require_all_tokens(descriptor.layout)
        self._receiver = Receiver(
            ref=self.ref,
            layout=descriptor.layout,
            tickets=NoTickets(),
            on_released=self._events.failed,
            lease_ttl_s=self._settings.lease_ttl_s,
            quarantine_s=self._settings.quarantine_s,
        )
        self._fetch_service = self._make_fetch_service(descriptor)
        self._server = GrpcServer(self._settings.server, SERVICES)
        grpc_server = self._server.server
        pair_pb2_grpc.add_PairServiceServicer_to_server(self._fetch_service, grpc_server)
        handoff_pb2_grpc.add_HandoffServiceServicer_to_server(
            HandoffServicer(self._receiver), grpc_server
        )
        endpoint = await self._server.start()
        self._fetch_client = FetchClient(
            ref=self.ref,
            endpoint=endpoint,
            receiver=self._receiver,
            on_whole=self._events.whole,
            on_rejected=self._events.failed,
        )
        return endpoint

    def _make_fetch_service(self, descriptor: KvDescriptor) -> FetchService:
        return FetchService(
            ref=self.ref,
            descriptor=descriptor,
            pending=self.pending_fetches,
            memories=self._memories,
            stop=self._link.stop,
            timeout_s=self._settings.transfer_timeout_s,
        )

    def _transfer_quiet(self, report: SendReport) -> None:
        self._fetch_service.transfer_quiet(report)

    def _rank_lost(self, why: str) -> None:
        # vLLM itself detects that a rank has ended, and ends the engine.
        log.error("%s", why)

    def start_fetch(self, plan: FetchPlan) -> None:
        """See PairPeer, as for the next two."""
        self._loop.call_soon_threadsafe(self._fetch_client.start_fetch, plan)

    def cancel_fetch(self, transfer_id: str) -> None:
        self._loop.call_soon_threadsafe(self._fetch_client.cancel_fetch, transfer_id)

    def fail_fetch(self, transfer_id: str, error: HeadraceError) -> None:
        self._loop.call_soon_threadsafe(self._fetch_service.fail, transfer_id, error)

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
        await self._fetch_client.close()
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


class StandaloneConnectorScheduler(ConnectorScheduler):
    """Arranges transfers with peers that requests name. Starts and closes the process's StandaloneNode.

    The constructor returns once all `rank_count` ranks have attached. Raises ConfigError or InternalError.
    """

    def __init__(
        self,
        groups: tuple[LayerGroup, ...],
        connector: ConnectorSettings,
        settings: StandaloneSettings,
        rank_count: int,
        steps_max: int = 1,
    ) -> None:
        tiers = TierPlanner(LowerTiers({}), 1)
        super().__init__(groups, self._blocks_reserved, SHORT_STEP_S, tiers, steps_max)
        events = TransferEvents(self._transfer_whole, self._transfer_failed)
        self._node = StandaloneNode(connector, settings, rank_count, events)
        self._pairs = PairScheduler(
            ref=self._node.ref,
            endpoint=self._node.start(),
            pending=self._node.pending_fetches,
            peer=self._node,
            can_send=connector.role != "decode",
            can_receive=connector.role != "prefill",
            timeout_s=settings.transfer_timeout_s,
            kv_hold_timeout_s=settings.kv_hold_timeout_s,
        )

    def _blocks_reserved(self, reservation: Reservation) -> None:
        self._pairs.blocks_reserved(reservation)

    def _transfer_whole(self, transfer_id: str, summary: TransferSummary) -> None:
        self._pairs.transfer_whole(transfer_id, summary)
        self._planner.transfer_settled(transfer_id, whole=True)

    def _transfer_failed(self, transfer_id: str) -> None:
        self._planner.transfer_settled(transfer_id, whole=False)

    def on_new_request(self, request: Request) -> None:
        """Does nothing: a client sets its requests' arguments itself, so none of them adds generated tokens."""

    def _may_schedule(self, request: Request) -> bool:
        return self._pairs.prepare(prompt_of(request))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepPlan:
        plan = super().build_connector_meta(scheduler_output)
        self._pairs.plan_held(plan)
        return plan

    def request_finished(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        times = self._planner.request_finished(request.request_id)
        held, params = self._pairs.request_finished(
            prompt_of(request),
            self._planner.in_layout_order(block_ids),
            opened=times is not None,
            complete=is_complete(request),
        )
        return held or times is not None, params

    def shutdown(self) -> None:
        self._node.close()


def prompt_of(request: Request) -> Prompt:
    """The request's prompt. One that is not made of tokens has none here, and is not transferred."""
    adapter = request.lora_request
    return Prompt(
        request_id=request.request_id,
        token_ids=() if request.prompt_embeds is not None else request.prompt_token_ids or (),
        extras=(
            _identity_of(adapter.lora_name, adapter.lora_path) if adapter is not None else "",
            *(feature.identifier for feature in request.mm_features),
        ),
        params=request.kv_transfer_params,
    )


@lru_cache(maxsize=ADAPTERS_MAX)
def _identity_of(name: str, path: str) -> str:
    """Adapters of one name differ when their files do. Without files in a folder, the name of the download counts."""
    try:
        return f"adapter {name} {digest_of_adapter(Path(path))}"
    except (OSError, ValueError, KeyError, TypeError):
        return f"adapter {name} {path}"


def is_complete(request: Request) -> bool:
    """Whether the request has ended by itself, so that its whole prompt is in the cache."""
    from vllm.v1.request import RequestStatus

    ended = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
    return request.status in ended and request.num_computed_tokens >= request.num_prompt_tokens
