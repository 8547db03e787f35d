"""The peers of requests in an engine of Headrace's services: the service names them, over the link."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Future
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.engine.v1 import link_pb2
from headrace_common.callers.priority import Priority
from headrace_common.time_model.model import StepTimes
from headrace_engine.connector.layer_groups import LayerGroup
from headrace_engine.connector.step_plan import StepPlan
from headrace_engine.connector.step_planner import LONG_STEP_S, StepPlanner
from headrace_engine.connector.tier_planner import TierPlanner
from headrace_engine.connector.transfers import PrefillTimes
from headrace_engine.receipts import RequestCost
from headrace_engine.vllm import continuation
from headrace_engine.vllm.compat import block_counts
from headrace_engine.vllm.link.client import EngineLink
from headrace_engine.vllm.link.messages import (
    keep_answer,
    load_to_proto,
    steps_to_proto,
    terms_from_proto,
)
from headrace_engine.vllm.scheduler.comparisons import ComparisonPlanner
from headrace_engine.vllm.scheduler.connector_scheduler import Peers, scheduled_requests
from headrace_engine.vllm.scheduler.load import LoadMeter, StepStarts, report_changes
from headrace_engine.vllm.settings import (
    PRIORITY_KEY,
    STEP_KEY,
    ConnectorSettings,
    keep_terms,
    params_with,
)
from headrace_kv.layout import layout_from_proto
from headrace_kv.messages import Reservation, reservation_to_proto
from headrace_kv.tiers.pool import BlockLookup, PoolKeys, RemotePool, pool_secret
from headrace_kv.tiers.promises import Kept

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


log = logging.getLogger(__name__)


class LinkedPeers(Peers):
    """Exchanges events with the service over the link, and reports the engine's load there."""

    idle_step_s = LONG_STEP_S

    def __init__(
        self, groups: tuple[LayerGroup, ...], settings: ConnectorSettings, tiers: TierPlanner
    ) -> None:
        self._settings = settings
        self._tiers = tiers
        self._pool: RemotePool | None = None
        self._load = LoadMeter(tiers.promises.counts)
        self._starts = StepStarts(
            lambda transfer_id, monotonic_ns: self._send(
                step_started=link_pb2.StepStarted(
                    transfer_id=transfer_id, monotonic_ns=monotonic_ns
                )
            )
        )
        self._comparisons = ComparisonPlanner(
            groups[0],
            lambda comparison_id: self._send(
                blocks_compared=link_pb2.BlocksCompared(comparison_id=comparison_id)
            ),
        )

    def start(self, planner: StepPlanner) -> None:
        self._planner = planner
        self._link = EngineLink(
            Path(self._settings.link_path), link_pb2.Attachment(scheduler=True), self._on_response
        )
        self._load_reports = asyncio.run_coroutine_threadsafe(
            report_changes(
                self._load,
                lambda load: self._send(load=load_to_proto(load)),
                lambda steps: self._send(steps=steps_to_proto(steps)),
            ),
            self._link.loop,
        )
        self._load_reports.add_done_callback(_log_failure)

    def _send(self, **message: Any) -> None:
        self._link.send(link_pb2.AttachRequest(**message))

    def reserved(self, reservation: Reservation) -> None:
        self._send(reservation=reservation_to_proto(reservation))

    def _on_response(self, response: link_pb2.AttachResponse) -> None:
        if response.HasField("transfer_event"):
            self._transfer_event(response.transfer_event)
        elif response.HasField("request_coming"):
            self._planner.request_announced()
        elif response.HasField("open_pool"):
            self._open_pool(response.open_pool)
        elif response.HasField("keep_query"):
            kept = self._tiers.promises.renew(terms_from_proto(response.keep_query))
            self._send(keep_answer=keep_answer(kept), answered_query_id=response.query_id)

    def _transfer_event(self, event: link_pb2.TransferEvent) -> None:
        if event.kind == link_pb2.TransferEvent.KIND_FIRST_TOKEN:
            self._planner.first_token_received(event.transfer_id, event.token_id)
        elif event.kind == link_pb2.TransferEvent.KIND_RECOMPUTE:
            self._planner.transfer_late(event.transfer_id)
        elif event.kind == link_pb2.TransferEvent.KIND_LAYERS_ARRIVED:
            self._planner.layers_arrived(event.transfer_id)
        else:
            whole = event.kind == link_pb2.TransferEvent.KIND_ARRIVED
            self._planner.transfer_settled(event.transfer_id, whole=whole)

    def _open_pool(self, opened: link_pb2.OpenPool) -> None:
        secret, layout = pool_secret(opened.prefix_hash_key), layout_from_proto(opened.layout)
        self._pool = self._settings.pool_opener()((), secret, self._tiers.pool.lost)
        self._tiers.pool.attach(BlockLookup(self._pool, PoolKeys(secret, layout)))

    def bind(self, kv_cache_manager: KVCacheManager) -> None:
        self._load.bind(lambda: block_counts(kv_cache_manager))
        self._comparisons.bind(kv_cache_manager)

    def request_added(self, request: Request) -> None:
        self._load.request_added(request.request_id)
        extra = getattr(request.sampling_params, "extra_args", None) or {}
        self._starts.request_added(request.request_id, _step_name(request))
        self._comparisons.request_added(request)
        continuation.add_generated_tokens(request)
        priority = Priority(extra.get(PRIORITY_KEY, Priority.NORMAL))
        self._tiers.request_added(request.request_id, request.block_hashes, priority)

    def may_schedule(self, request: Request, cached_tokens: int) -> bool:
        return self._comparisons.may_run(request.request_id, cached_tokens)

    def step_planned(self, output: SchedulerOutput, plan: StepPlan) -> None:
        self._starts.step_planned(output.num_scheduled_tokens)
        plan.compare(self._comparisons.plan(scheduled_requests(output)))
        self._load.step_planned(output, self._planner.sending, waits=bool(plan.awaited))

    def step_ended(self) -> None:
        self._load.step_ended()

    @property
    def step_times(self) -> StepTimes:
        return self._load.step_times

    def request_finished(
        self,
        request: Request,
        block_ids: tuple[tuple[int, ...], ...],
        times: PrefillTimes | None,
    ) -> tuple[bool, dict[str, Any] | None]:
        answered = continuation.has_answer(request)
        cost = self._load.request_finished(
            request.request_id, by_step=answered, billed=answered or bool(_step_name(request))
        )
        self._comparisons.request_finished(request.request_id)
        self._starts.request_finished(request.request_id)
        if not answered:
            self._report_failure(request, cost)
            return False, None if times is None else params_with(times)
        return False, params_with(times or self._keep(request), cost)

    def _keep(self, request: Request) -> Kept | None:
        """Promises the KV of an answered request, if it asks for it."""
        terms = keep_terms(getattr(request.sampling_params, "extra_args", None))
        if terms is None:
            return None
        return self._tiers.keep(request.request_id, request.num_computed_tokens, terms)

    def _report_failure(self, request: Request, cost: RequestCost) -> None:
        if name := _step_name(request):
            load_failed = self._tiers.loads_for(request.request_id)
            self._send(
                request_failed=link_pb2.RequestFailed(
                    transfer_id=name, load_failed=load_failed, cost=astuple(cost)
                )
            )

    def close(self) -> None:
        self._load_reports.cancel()
        self._link.close()
        if self._pool is not None:
            self._pool.close()


def _step_name(request: Request) -> str:
    """The transfer of an answer. Empty for a prompt."""
    extra = getattr(request.sampling_params, "extra_args", None) or {}
    return str(extra.get(STEP_KEY, ""))


def _log_failure(reports: Future[None]) -> None:
    error = None if reports.cancelled() else reports.exception()
    if error is not None:
        log.error("the engine's load is not reported any more", exc_info=error)
