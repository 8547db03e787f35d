"""The scheduler's half of the connector."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from headrace_common.time_model.model import NO_STEPS, StepTimes
from headrace_engine.connector.layer_groups import LayerGroup
from headrace_engine.connector.step_plan import StepPlan
from headrace_engine.connector.step_planner import SHORT_STEP_S, StepPlanner
from headrace_engine.connector.tier_planner import TierPlanner
from headrace_engine.connector.transfers import PrefillTimes, ScheduledRequest
from headrace_engine.vllm import continuation
from headrace_engine.vllm.compat import tier_event
from headrace_engine.vllm.settings import consume_params, read_params
from headrace_kv.messages import Reservation

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


def sort_new_blocks(kv_cache_manager: KVCacheManager) -> None:
    """Gives requests their new blocks in ascending order, so that a transfer copies neighbouring blocks as one.

    vLLM frees a request's last block first, and would hand the same blocks out in descending order. Which blocks are
    handed out, and evicted from the prefix cache, does not change.
    """
    pool = kv_cache_manager.block_pool
    take = pool.get_new_blocks

    def get_new_blocks(num_blocks: int) -> list[KVCacheBlock]:
        return sorted(take(num_blocks), key=lambda block: block.block_id)

    pool.get_new_blocks = get_new_blocks


class VllmPoolBlocks:
    """Holders of blocks in vLLM's pool, which has one numbering for all groups. The null block stores nothing."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    def hold(self, block_ids_by_group: Sequence[Sequence[int]]) -> None:
        self._pool.touch(self._find(block_ids_by_group))

    def release(self, block_ids_by_group: Sequence[Sequence[int]]) -> None:
        # A request's last block is evicted first, as vLLM does it.
        self._pool.free_blocks(reversed(self._find(block_ids_by_group)))

    def _find(self, block_ids_by_group: Sequence[Sequence[int]]) -> list[KVCacheBlock]:
        blocks = (self._pool.blocks[one] for block_ids in block_ids_by_group for one in block_ids)
        return [block for block in blocks if not block.is_null]


class StepsUnderWay:
    """With pipeline stages or asynchronous scheduling, vLLM plans several steps before it handles the results of the
    first.

    It handles results after it has planned the next step. So a planned step must not wait while one before it may have
    results.
    """

    def __init__(self, most: int) -> None:
        """`most`: how many steps are planned before the results of the first are handled."""
        self._have_results = deque[bool](maxlen=most - 1)

    @property
    def may_have_results(self) -> bool:
        """Whether a planned step computes or changes something, and its results may not be handled."""
        return any(self._have_results)

    def add(self, *, has_results: bool) -> None:
        """A step is planned. The results of the oldest of `most` steps are handled."""
        self._have_results.append(has_results)


class Peers:
    """Where requests get their peers from, and where the blocks that are reserved for them are reported.

    The scheduling thread calls all methods. This one is of an engine without peers.
    """

    idle_step_s = SHORT_STEP_S
    """The longest that a step without tokens waits for an event."""

    def start(self, planner: StepPlanner) -> None:
        """Once, at first. Events of transfers go to `planner` from now on. Raises ConfigError or InternalError."""

    def reserved(self, reservation: Reservation) -> None:
        """See StepPlanner."""

    def bind(self, kv_cache_manager: KVCacheManager) -> None:
        """Sets vLLM's blocks, once."""

    def request_added(self, request: Request) -> None:
        """The scheduler has a new request."""

    def may_schedule(self, request: Request, cached_tokens: int) -> bool:
        """Whether the request need not wait for its transfer to be arranged."""
        return True

    def step_planned(self, output: SchedulerOutput, plan: StepPlan) -> None:
        """A step is planned. May add to the plan."""

    def step_ended(self) -> None:
        """The results of the oldest planned step are handled."""

    @property
    def step_times(self) -> StepTimes:
        """What was learned of the time of steps."""
        return NO_STEPS

    def request_finished(
        self,
        request: Request,
        block_ids: tuple[tuple[int, ...], ...],
        times: PrefillTimes | None,
    ) -> tuple[bool, dict[str, Any] | None]:
        """Whether the blocks, by group of the layout, must stay, and the kv_transfer_params of the last output.

        `times` of a request that has opened its transfer.
        """
        return False, None

    def close(self) -> None:
        """Ends every transfer."""


class ConnectorScheduler:
    """Its public methods are hooks of vLLM's KVConnectorBase_V1. The scheduling thread calls them."""

    def __init__(
        self,
        groups: tuple[LayerGroup, ...],
        peers: Peers,
        tiers: TierPlanner,
        steps_max: int = 1,
        *,
        in_lockstep: bool = False,
    ) -> None:
        """`steps_max`: see StepsUnderWay. Raises what `peers` raise.

        `in_lockstep`: other data-parallel ranks wait in each of their steps for this one's, so no step waits for an
        event.
        """
        self._tiers = tiers
        self._peers = peers
        self._planner = StepPlanner(groups, peers.reserved)
        # One group of vLLM may count as two.
        self._group_ids = tuple(sorted({group.index for group in groups}))
        self._in_lockstep = in_lockstep
        self._kv_cache_manager: KVCacheManager | None = None
        self._steps_under_way = StepsUnderWay(steps_max)
        self._flush_requested = False
        self._loads_beside = False
        peers.start(self._planner)

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        self._planner.holds.bind(VllmPoolBlocks(kv_cache_manager.block_pool))
        sort_new_blocks(kv_cache_manager)
        self._kv_cache_manager = kv_cache_manager
        self._peers.bind(kv_cache_manager)

    def get_loaded_kv_cache_group_ids(self) -> tuple[int, ...]:
        """All groups: vLLM must not clear blocks that prefill may be writing into."""
        return self._group_ids

    def on_new_request(self, request: Request) -> None:
        self._peers.request_added(request)

    def reset_cache(self) -> bool:
        """vLLM has emptied the prefix cache. Asks for a step, since vLLM publishes KV events in steps only."""
        self._flush_requested = True
        self._tiers.clear()
        return True

    def has_pending_push_work(self) -> bool:
        # Held blocks are released in a step.
        return self._flush_requested or self._tiers.pool.is_moving or bool(self._planner.holds)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if not self._peers.may_schedule(request, num_computed_tokens):
            return None, False
        if num_computed_tokens and self._planner.partial.receives:
            # vLLM caches blocks before all of their layers are whole.
            return None, False
        if request.skip_reading_prefix_cache:
            # vLLM would ignore what is found, and it computes the whole prompt.
            return 0, False
        # The last token is computed: its hidden state is needed.
        found = self._tiers.find(request.request_id, num_computed_tokens, request.num_tokens - 1)
        if found is None:
            return None, False
        missing = self._planner.missing_tokens(
            read_params(request.kv_transfer_params),
            request.num_tokens,
            num_computed_tokens + found,
        )
        return found + missing, found + missing > 0

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        block_ids = blocks.get_block_ids()
        loaded = self._tiers.blocks_allocated(request.request_id, block_ids[0], num_external_tokens)
        self._planner.blocks_allocated(
            request.request_id,
            consume_params(request.kv_transfer_params),
            block_ids,
            request.num_tokens,
            num_external_tokens - loaded,
            partial(continuation.add_first_token, request),
        )
        # A request that also waits for a prefix may have to leave its blocks.
        if loaded and loaded == num_external_tokens:
            self._planner.send_before_running(
                request.request_id, partial(self._tiers.send_from_host, request.request_id)
            )

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepPlan:
        self._flush_requested = False
        computes = scheduler_output.total_num_scheduled_tokens > 0
        waits = not (computes or self._in_lockstep or self._steps_under_way.may_have_results)
        if waits:
            # The engine learns of the end of a load with a step's results.
            idle_s = SHORT_STEP_S if self._is_loading else self._peers.idle_step_s
            self._planner.wait_for_event(idle_s)
        scheduled = tuple(scheduled_requests(scheduler_output))
        preempted_ids = scheduler_output.preempted_req_ids or ()
        plan = self._planner.plan_step(scheduled, preempted_ids, self._written)
        self._plan_tiers(plan, scheduled, preempted_ids)
        # The end of a load is a result of a step that plans nothing.
        has_results = computes or plan != StepPlan() or self._is_loading
        self._steps_under_way.add(has_results=has_results)
        self._peers.step_planned(scheduler_output, plan)
        return plan

    def _written(self, request: ScheduledRequest) -> Iterator[int]:
        """The blocks into which a step writes KV of a request. vLLM may have cached them already."""
        manager = self._kv_cache_manager
        end = request.computed_tokens + request.step_tokens
        if manager is not None:
            groups = manager.kv_cache_config.kv_cache_groups
            found = manager.get_block_ids(request.request_id)
            for group, block_ids in zip(groups, found, strict=True):
                size = group.kv_cache_spec.block_size
                yield from block_ids[request.computed_tokens // size : -(-end // size)]

    def request_left(self, request: Request) -> None:
        """A request gives up its blocks. What lacks KV in them is evicted from the prefix cache."""
        if not self._planner.partial.receives:
            return
        start = self._planner.request_leaves(request.request_id)
        if start is not None and self._kv_cache_manager is not None:
            manager, name = self._kv_cache_manager, request.request_id
            lacking = (
                block_ids[start // group.kv_cache_spec.block_size :]
                for group, block_ids in zip(
                    manager.kv_cache_config.kv_cache_groups,
                    manager.get_block_ids(name),
                    strict=True,
                )
            )
            manager.evict_blocks(set().union(*lacking))

    def take_received(self) -> list[str]:
        """See StepPlanner. Requests that also load from tiers wait for the end of a step."""
        return self._planner.take_received(self._tiers.loads_for)

    def set_loads_beside(self, loads: bool) -> None:
        """Before `build_connector_meta`: whether another connector loads KV for requests."""
        self._loads_beside = loads

    @property
    def _is_loading(self) -> bool:
        return self._loads_beside or self._tiers.is_loading

    def _plan_tiers(
        self, plan: StepPlan, scheduled: Iterable[ScheduledRequest], preempted_ids: Iterable[str]
    ) -> None:
        plan.preempted_stores.extend(
            request_id for request_id in preempted_ids if self._tiers.request_preempted(request_id)
        )
        for request in scheduled:
            self._tiers.step_planned(
                request.request_id,
                request.computed_tokens,
                request.block_ids[0] if request.block_ids else (),
                replaces=request.replaces_blocks,
            )
        self._tiers.add_to(plan)

    def moves_ended(self, moves: Iterable[tuple[int, int]]) -> None:
        """Ranks have ended moves from and to the remote pool."""
        self._tiers.pool.moves_ended(moves)

    def host_sends_ended(self, numbers: Iterable[int]) -> None:
        """Ranks have ended sends from main memory."""
        self._tiers.host_sends.ended(numbers)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        received = connector_output.finished_recving
        if received:
            self._tiers.loads_ended(received, connector_output.failed_recving or ())

    def take_events(self) -> list[KVCacheEvent]:
        """What the tiers below KV memory have stored and evicted. Blocks are named as in the events of KV memory."""
        # vLLM asks for events once the results of a step are handled.
        self._peers.step_ended()
        return [tier_event(change) for change in self._tiers.take_changes()]

    @property
    def step_times(self) -> StepTimes:
        """See Peers."""
        return self._peers.step_times

    def request_finished(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Whether the request's blocks must stay, and the kv_transfer_params of its last output."""
        self.request_left(request)
        times = self._planner.request_finished(request.request_id)
        held, params = self._peers.request_finished(
            request, self._planner.in_layout_order(block_ids), times
        )
        copies = self._tiers.request_finished(
            request.request_id, request.num_computed_tokens, sends=times is not None
        )
        return held or copies or times is not None, params

    def shutdown(self) -> None:
        self._peers.close()


def scheduled_requests(output: SchedulerOutput) -> Iterator[ScheduledRequest]:
    """The requests of a step, without the drafts that it verifies."""
    drafts = output.scheduled_spec_decode_tokens
    steps = {
        request_id: count - len(drafts.get(request_id, ()))
        for request_id, count in output.num_scheduled_tokens.items()
    }
    for new in output.scheduled_new_reqs:
        yield ScheduledRequest(
            new.req_id, new.num_computed_tokens, steps[new.req_id], new.block_ids, True
        )
    cached = output.scheduled_cached_reqs
    for request_id, computed, block_ids in zip(
        cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
    ):
        yield ScheduledRequest(
            request_id,
            computed,
            steps[request_id],
            block_ids or (),
            request_id in cached.resumed_req_ids,
        )
