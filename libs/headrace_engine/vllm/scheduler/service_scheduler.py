"""The scheduler's half of the connector in an engine of Headrace's services, with its load."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Container, Mapping
from concurrent.futures import Future
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from headrace.engine.v1 import link_pb2
from headrace_common.callers.priority import Priority
from headrace_common.time_model.model import Step, StepTimes
from headrace_engine.connector.layer_groups import LayerGroup
from headrace_engine.connector.step_plan import StepPlan
from headrace_engine.connector.step_planner import LONG_STEP_S
from headrace_engine.connector.tier_planner import TierPlanner
from headrace_engine.steps import EngineSteps, StepMeter
from headrace_engine.vllm import continuation
from headrace_engine.vllm.compat import block_counts
from headrace_engine.vllm.link.client import EngineLink
from headrace_engine.vllm.link.messages import (
    EngineLoad,
    keep_answer,
    load_to_proto,
    reservation_to_proto,
    steps_to_proto,
    terms_from_proto,
)
from headrace_engine.vllm.scheduler.comparisons import ComparisonPlanner
from headrace_engine.vllm.scheduler.connector_scheduler import (
    ConnectorScheduler,
    scheduled_requests,
)
from headrace_engine.vllm.settings import (
    PRIORITY_KEY,
    STEP_KEY,
    ConnectorSettings,
    keep_terms,
    kept_params,
    times_params,
)
from headrace_kv.layout import layout_from_proto
from headrace_kv.manager.promises import NO_PROMISES, PromiseCounts
from headrace_kv.messages import Reservation
from headrace_kv.pool.engine_blocks import BlockLookup, PoolKeys, pool_secret
from headrace_kv.pool.remote import RemotePool

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


REPORT_S: Final = 0.05
_POLLS_PER_STEPS: Final = 5
_POLLS_PER_SECOND: Final = 20


class LoadMeter:
    """Follows requests and steps by the scheduler's hooks, on the scheduling thread. Any thread may read."""

    def __init__(self, count_promises: Callable[[], PromiseCounts] = lambda: NO_PROMISES) -> None:
        self._meter = StepMeter()
        self._known: set[str] = set()
        self._running: set[str] = set()
        self._count_blocks: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self._count_promises = count_promises

    def bind(self, count_blocks: Callable[[], tuple[int, int]]) -> None:
        """`count_blocks` reads vLLM's (used, total) blocks."""
        self._count_blocks = count_blocks

    def request_added(self, request_id: str) -> None:
        """The scheduler has a new request."""
        self._known.add(request_id)
        self._meter.request_added()

    def step_planned(self, output: SchedulerOutput, sending: Container[str] = ()) -> None:
        """A step is planned. One of its requests may have been preempted before. `sending`: see step_of."""
        self._running.difference_update(output.preempted_req_ids or ())
        self._running.update(output.num_scheduled_tokens)
        continues = bool(output.scheduled_cached_reqs.req_ids)
        self._meter.planned(step_of(output, sending), len(self._known), continues=continues)

    def step_ended(self) -> None:
        """The results of the oldest planned step are handled."""
        self._meter.ended()

    def request_finished(self, request_id: str) -> None:
        """A request has ended, in whatever state."""
        self._known.discard(request_id)
        self._running.discard(request_id)
        if not self._known:
            self._meter.idle()

    @property
    def steps(self) -> EngineSteps:
        """The steps until now."""
        return self._meter.steps

    @property
    def step_times(self) -> StepTimes:
        """What the steps have shown."""
        return self._meter.times

    def read(self) -> EngineLoad:
        """The current load."""
        used, total = self._count_blocks()
        running = len(self._running)
        waiting = max(0, len(self._known) - running)
        return EngineLoad(running, waiting, used, total, self.step_times, self._count_promises())


def step_of(output: SchedulerOutput, sending: Container[str] = ()) -> Step:
    """A request with one token beside its drafts counts as an answer. The KV of requests in `sending` is sent."""
    cached, new, tokens = (
        output.scheduled_cached_reqs,
        output.scheduled_new_reqs,
        output.num_scheduled_tokens,
    )
    context_tokens = sum(cached.num_computed_tokens)
    context_tokens += sum(request.num_computed_tokens for request in new)
    if output.total_num_scheduled_tokens == len(tokens):
        return Step(running=len(tokens), context_tokens=context_tokens)
    computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    computed.update((request.req_id, request.num_computed_tokens) for request in new)
    drafts = output.scheduled_spec_decode_tokens
    prompt_tokens, attended_tokens, running, sent_tokens = 0, 0.0, 0, 0
    for request_id, added in tokens.items():
        if added - len(drafts.get(request_id, ())) <= 1:
            running += 1
            continue
        before = computed[request_id]
        prompt_tokens += added
        attended_tokens += added * (before + added / 2)
        context_tokens -= before
        if request_id in sending:
            sent_tokens += added
    return Step(prompt_tokens, attended_tokens, running, context_tokens, sent_tokens)


async def report_changes(
    meter: LoadMeter,
    send: Callable[[EngineLoad], None],
    send_steps: Callable[[EngineSteps], None] = lambda steps: None,
) -> None:
    """Sends the load at the start and after each change. Polls every `REPORT_S`: no hook follows a block's return.

    Sends the steps every 0.25 s if there were any, and else every second.
    """
    last: EngineLoad | None = None
    last_steps: EngineSteps | None = None
    for poll in count():
        load, steps = meter.read(), meter.steps
        if load != last:
            send(load)
            last = load
        if poll % _POLLS_PER_SECOND == 0 or (poll % _POLLS_PER_STEPS == 0 and steps != last_steps):
            send_steps(steps)
            last_steps = steps
        await asyncio.sleep(REPORT_S)


class StepStarts:
    """Reports each named request once, when its first step was planned. The scheduling thread calls all methods."""

    def __init__(self, on_start: Callable[[str, int], None]) -> None:
        """`on_start` gets the name and nanoseconds of the host's monotonic clock."""
        self._on_start = on_start
        self._names: dict[str, str] = {}

    def request_added(self, request_id: str, name: str) -> None:
        """The scheduler has a new request. One with an empty name is not reported."""
        if name:
            self._names[request_id] = name

    def step_planned(self, scheduled: Mapping[str, int]) -> None:
        """A step is about to begin. `scheduled` has its requests, with their tokens."""
        if not self._names:
            return
        started = self._names.keys() & scheduled.keys()
        if not started:
            return
        now_ns = time.monotonic_ns()
        for request_id in started:
            self._on_start(self._names.pop(request_id), now_ns)

    def request_finished(self, request_id: str) -> None:
        """The request has ended, perhaps before its first step."""
        self._names.pop(request_id, None)


log = logging.getLogger(__name__)


class ServiceConnectorScheduler(ConnectorScheduler):
    """Exchanges events with the service over the link at `link_path`, and reports the engine's load there."""

    def __init__(
        self,
        groups: tuple[LayerGroup, ...],
        link_path: Path,
        tiers: TierPlanner,
        settings: ConnectorSettings,
        steps_max: int = 1,
        *,
        in_lockstep: bool = False,
    ) -> None:
        super().__init__(
            groups, self._send_reserved, LONG_STEP_S, tiers, steps_max, in_lockstep=in_lockstep
        )
        self._settings = settings
        self._pool: RemotePool | None = None
        self._load = LoadMeter(tiers.promises.counts)
        self._starts = StepStarts(self._send_step_started)
        self._comparisons = ComparisonPlanner(groups[0], self._send_dropped)
        self._link = EngineLink(link_path, link_pb2.Attachment(scheduler=True), self._on_response)
        self._load_reports = asyncio.run_coroutine_threadsafe(
            report_changes(self._load, self._send_load, self._send_steps), self._link.loop
        )
        self._load_reports.add_done_callback(_log_failure)

    def _send_reserved(self, reservation: Reservation) -> None:
        self._link.send(link_pb2.AttachRequest(reserved=reservation_to_proto(reservation)))

    def _send_load(self, load: EngineLoad) -> None:
        self._link.send(link_pb2.AttachRequest(load=load_to_proto(load)))

    def _send_steps(self, steps: EngineSteps) -> None:
        self._link.send(link_pb2.AttachRequest(steps=steps_to_proto(steps)))

    def _send_step_started(self, transfer_id: str, monotonic_ns: int) -> None:
        started = link_pb2.StepStarted(transfer_id=transfer_id, monotonic_ns=monotonic_ns)
        self._link.send(link_pb2.AttachRequest(step_started=started))

    def _send_dropped(self, comparison_id: str) -> None:
        dropped = link_pb2.BlocksCompared(comparison_id=comparison_id)
        self._link.send(link_pb2.AttachRequest(blocks_compared=dropped))

    def _on_response(self, response: link_pb2.AttachResponse) -> None:
        if response.HasField("arrived"):
            self._planner.transfer_settled(response.arrived.transfer_id, whole=True)
        elif response.HasField("first_token"):
            first = response.first_token
            self._planner.first_token_received(first.transfer_id, first.token_id)
        elif response.HasField("released"):
            self._planner.transfer_settled(response.released.transfer_id, whole=False)
        elif response.HasField("recompute"):
            self._planner.transfer_late(response.recompute.transfer_id)
        elif response.HasField("request_coming"):
            self._planner.request_announced()
        elif response.HasField("open_pool"):
            self._open_pool(response.open_pool)
        elif response.HasField("keep_query"):
            kept = self._tiers.promises.renew(terms_from_proto(response.keep_query))
            answer = keep_answer(response.keep_query.query_id, kept)
            self._link.send(link_pb2.AttachRequest(keep_answer=answer))

    def _open_pool(self, opened: link_pb2.OpenPool) -> None:
        secret, layout = pool_secret(opened.prefix_hash_key), layout_from_proto(opened.layout)
        self._pool = self._settings.pool_opener()((), secret, self._tiers.pool.lost)
        self._tiers.pool.attach(BlockLookup(self._pool, PoolKeys(secret, layout)))

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._load.bind(lambda: block_counts(kv_cache_manager))
        self._comparisons.bind(kv_cache_manager)

    def on_new_request(self, request: Request) -> None:
        self._load.request_added(request.request_id)
        extra = getattr(request.sampling_params, "extra_args", None) or {}
        self._starts.request_added(request.request_id, extra.get(STEP_KEY, ""))
        self._comparisons.request_added(request)
        continuation.add_generated_tokens(request)
        priority = Priority(extra.get(PRIORITY_KEY, Priority.NORMAL))
        self._tiers.request_added(request.request_id, request.block_hashes, priority)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if not self._comparisons.may_run(request.request_id, num_computed_tokens):
            return None, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepPlan:
        self._starts.step_planned(scheduler_output.num_scheduled_tokens)
        plan = super().build_connector_meta(scheduler_output)
        plan.compare(self._comparisons.plan(scheduled_requests(scheduler_output)))
        self._load.step_planned(scheduler_output, self._planner.sending)
        return plan

    @property
    def step_times(self) -> StepTimes:
        return self._load.step_times

    def take_events(self) -> list[KVCacheEvent]:
        # vLLM asks for events once the results of a step are handled.
        self._load.step_ended()
        return super().take_events()

    def request_finished(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._load.request_finished(request.request_id)
        self._comparisons.request_finished(request.request_id)
        self._report_failure(request)
        self._starts.request_finished(request.request_id)
        times = self._planner.request_finished(request.request_id)
        kept = self._keep(request)
        copies = self._tiers.request_finished(
            request.request_id, request.num_computed_tokens, sends=times is not None
        )
        if times is None:
            return copies, kept
        return True, times_params(times)

    def _keep(self, request: Request) -> dict[str, Any] | None:
        """Promises the KV of an answered request that asks for it."""
        terms = keep_terms(getattr(request.sampling_params, "extra_args", None))
        if terms is None or not continuation.has_answer(request):
            return None
        kept = self._tiers.keep(request.request_id, request.num_computed_tokens, terms)
        return None if kept is None else kept_params(kept)

    def _report_failure(self, request: Request) -> None:
        failed_id = continuation.failure_id(request)
        if failed_id:
            load_failed = self._tiers.loads_for(request.request_id)
            failed = link_pb2.RequestFailed(transfer_id=failed_id, load_failed=load_failed)
            self._link.send(link_pb2.AttachRequest(request_failed=failed))

    def shutdown(self) -> None:
        self._load_reports.cancel()
        self._link.close()
        if self._pool is not None:
            self._pool.close()


def _log_failure(reports: Future[None]) -> None:
    error = None if reports.cancelled() else reports.exception()
    if error is not None:
        log.error("the engine's load is not reported any more", exc_info=error)
