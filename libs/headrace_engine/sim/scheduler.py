"""The step loop of a sim engine, and the requests that it works on."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Collection
from collections.abc import Sequence as Items
from functools import partial

from headrace_common.errors import (
    Draining,
    DuplicateTransfer,
    HeadraceError,
    InternalError,
    TransferFailed,
)
from headrace_engine.connector.layer_groups import LayerGroup
from headrace_engine.connector.step_plan import StepPlan
from headrace_engine.connector.step_planner import StepPlanner
from headrace_engine.connector.transfers import ScheduledRequest
from headrace_engine.sim.cache.pools import CachePools
from headrace_engine.sim.model.settings import SimShape
from headrace_engine.sim.ranks import Ranks
from headrace_engine.sim.sequence import Answer, Prompt, Sequence, Wait
from headrace_engine.sim.stepper import Chunk, SimClock, Stepper, columns_of, plan_step
from headrace_engine.steps import StepMeter
from headrace_kv.messages import Reservation

_logger = logging.getLogger(__name__)
_WAITING_PER_RUNNING = 4
_WAITING_MIN = 64


class Scheduler:
    """Owns the requests of one engine: which wait, which run, and when their blocks are freed.

    `run` is the step loop. All methods are called on its event loop. `planner` gets the events of transfers, each
    followed by `wake`. What it plans is done at once, in steps that compute nothing, unless a request's tokens are
    computed.
    """

    def __init__(
        self,
        groups: Items[LayerGroup],
        shape: SimShape,
        pools: CachePools,
        ranks: Ranks,
        stepper: Stepper,
        clock: SimClock,
    ) -> None:
        self._shape = shape
        self._pools = pools
        self._tiers = pools.tiers
        self._has_tiers = bool(self._tiers.names)
        self._ranks = ranks
        self._stepper = stepper
        self._clock = clock
        self.planner = StepPlanner(groups, self._reserved)
        self.planner.holds.bind(pools)
        self._waiting: deque[Sequence] = deque()
        self._running: deque[Sequence] = deque()
        self._by_id: dict[str, Sequence] = {}
        self._admitted: Sequence | None = None
        self._computing: Collection[Sequence] = ()
        """Those of the step that runs, which uses their blocks."""
        # Requests that send cached KV only.
        self._cached: list[Prompt] = []
        self._changed = False
        self._work = asyncio.Event()
        self._closing = self._stopped = False
        self.meter = StepMeter()
        """Measures the steps."""

    @property
    def running_count(self) -> int:
        """Requests that hold blocks and have not ended."""
        return len(self._running)

    @property
    def waiting_count(self) -> int:
        """Requests that wait for blocks or for a place among the running ones."""
        return len(self._waiting)

    def find(self, transfer_id: str) -> Sequence | None:
        """The request of that transfer, until its blocks are freed."""
        return self._by_id.get(transfer_id)

    def submit(self, sequence: Sequence, full: type[HeadraceError]) -> None:
        """Queues a request. Raises Draining, DuplicateTransfer, or `full` when too many wait."""
        if self._closing:
            raise Draining("the engine is not running")
        if sequence.transfer_id in self._by_id:
            raise DuplicateTransfer(
                f"transfer {sequence.transfer_id} is already being worked on",
                metadata={"transfer_id": sequence.transfer_id},
            )
        if len(self._waiting) >= max(_WAITING_MIN, _WAITING_PER_RUNNING * self._shape.max_num_seqs):
            raise full(f"{len(self._waiting)} requests are waiting already")
        self._by_id[sequence.transfer_id] = sequence
        self.meter.costs.request_added(sequence.transfer_id)
        self._waiting.append(sequence)
        self._tiers.request_added(sequence.transfer_id, sequence.names, sequence.priority)
        self._work.set()

    def fail(self, sequence: Sequence, failure: HeadraceError) -> None:
        """Ends a request with a failure."""
        sequence.fail(failure)
        self.update(sequence)

    def wake(self) -> None:
        """Must be called when `planner` was called, or a rank has sent a report."""
        self._changed = True
        self._work.set()
        if self._stopped:
            self._settle()

    def update(self, sequence: Sequence) -> None:
        """Must be called when a request has changed: frees its blocks if it needs them no more, and wakes the loop."""
        self._work.set()
        if self._by_id.get(sequence.transfer_id) is not sequence or not sequence.ended:
            return
        for queue in (self._waiting, self._running):
            if sequence in queue:
                queue.remove(sequence)
                name, computed = sequence.transfer_id, sequence.computed
                if self.planner.partial.receives and self.planner.request_leaves(name) is None:
                    self._completed(sequence)
                times = self.planner.request_finished(name)
                sends = times is not None
                copied = self._tiers.request_finished(name, computed, sends=sends)
                sequence.finished(times, copied=copied)
                self.wake()
        if sequence.is_releasable and sequence not in self._computing:
            self._by_id.pop(sequence.transfer_id, None)
            self._pools.release(sequence.block_ids_by_group)

    async def run(self) -> None:
        """The step loop. Never returns. A step that fails unexpectedly fails all requests."""
        while True:
            try:
                if not await self._step():
                    self._work.clear()
                    self.meter.idle()
                    await self._clock.wait(self._work)
            except Exception:
                _logger.exception("a step of the sim engine failed")
                for sequence in tuple(self._by_id.values()):
                    self.fail(sequence, InternalError("a step of the sim engine failed"))
            await asyncio.sleep(0)

    def begin_close(self) -> None:
        """Fails all requests and refuses more."""
        self._closing = True
        for sequence in tuple(self._by_id.values()):
            self.fail(sequence, Draining("the engine is closing"))

    def end_close(self) -> None:
        """`run` was cancelled: frees blocks that a step held, and others as soon as nothing uses them."""
        self._stopped = True
        self.wake()
        for sequence in tuple(self._by_id.values()):
            self.update(sequence)

    async def _step(self) -> bool:
        """Admits requests and computes one step; False when there is nothing to compute."""
        self._settle()
        self._admit()
        while self._is_due:
            self._settle()
            self._admit()
        chunks = plan_step(
            # A call of `is_ready` would cost as much as a tenth of a token.
            [one for one in self._running if not (one.ended or one.waits)],
            self._shape.max_num_batched_tokens,
            self._shape.span_tokens,
        )
        if not chunks:
            return False
        waits = self.planner.partial.receives != {}
        sends = self._measure(chunks, waits=waits)
        plan = None
        if sends or waits or self._has_tiers:
            plan = self._begin([chunk.sequence.part_of_step(chunk.end) for chunk in chunks])
        self._computing = {chunk.sequence for chunk in chunks}
        start_ns = time.monotonic_ns()
        try:
            await self._stepper.compute(chunks, sends=sends)
            self.meter.book()
            for chunk in chunks:
                self._stepper.advance(chunk, start_ns)
        except InternalError as exc:
            for chunk in chunks:
                self.fail(chunk.sequence, exc)
        finally:
            self.meter.ended()
            self._computing = ()
            if plan is not None:
                self._end(plan)
        for chunk in chunks:
            # The others need their blocks still.
            if chunk.sequence.ended:
                self.update(chunk.sequence)
        self._work.set()
        self._running.rotate(-1)
        return True

    def _measure(self, chunks: Items[Chunk], *, waits: bool) -> bool:
        """A step begins. Whether it has prompts of others, which are sent. `waits`: see StepMeter."""
        columns, sending = columns_of(chunks), set[str]()
        if columns.prompts:
            sequences = (chunk.sequence for chunk in chunks)
            sending = {one.transfer_id for one in sequences if isinstance(one, Prompt)}
        self.meter.planned(columns.as_step(sending), len(chunks), columns=columns, waits=waits)
        return bool(sending)

    def _settle(self) -> None:
        """Handles what has changed of transfers, and sends cached KV."""
        while self._is_due:
            self._changed = False
            cached, self._cached = self._cached, []
            parts = [one.part_of_step(one.computed) for one in cached if not one.ended]
            plan = self._begin(parts)
            for layer in range(self._shape.settings.layer_count if parts else 0):
                self._ranks.layer_written(layer)
            for sequence in cached:
                if not sequence.ended:
                    self._stepper.end_prefill(sequence)
            self._end(plan)
            for sequence in cached:
                self.update(sequence)

    @property
    def _is_due(self) -> bool:
        """Whether there is something to do that takes no time."""
        return self._changed or bool(self._cached) or (self._has_tiers and self._tiers.is_due)

    def _begin(self, scheduled: Items[ScheduledRequest]) -> StepPlan:
        plan = self.planner.plan_step(scheduled, ())
        for one in scheduled:
            block_ids = one.block_ids[0] if one.block_ids else ()
            self._tiers.step_planned(
                one.request_id, one.computed_tokens, block_ids, replaces=one.replaces_blocks
            )
        self._tiers.add_to(plan)
        self._ranks.begin_step(plan)
        return plan

    def _end(self, plan: StepPlan) -> None:
        if plan.final:
            self._ranks.hidden_states_computed(
                lambda request_id: self._stepper.hidden_state(self._by_id[request_id])
            )
        quiet, loaded, failed = self._ranks.end_step()
        self._tiers.host_sends.ended(self._ranks.take_ended_host_sends())
        self._tiers.pool.moves_ended(self._ranks.take_moves())
        self._tiers.loads_ended(loaded, failed)
        self._pools.report_changes(self._waiting)
        for request_id in quiet:
            self._by_id[request_id].end_wait(Wait.QUIET)
            self.update(self._by_id[request_id])
        for request_id in plan.begun:
            self._by_id[request_id].layers_begun()
        for request_id in plan.completed:
            self._completed(self._by_id[request_id])
        received = [one for one in plan.received if one not in plan.begun]
        for request_id in (*received, *plan.failed):
            self._by_id[request_id].transfer_ended(failed=request_id in plan.failed)
        for request_id in loaded:
            self._by_id[request_id].copies_ended(failed=request_id in failed)
        for request_id in loaded.union(received, plan.failed):
            self._received(self._by_id[request_id])

    def _completed(self, sequence: Sequence) -> None:
        """All layers have arrived of a request that runs, or has run."""
        if sequence.is_partial:
            sequence.layers_completed()
            self._pools.register(sequence, sequence.cached, sequence.computed)

    def _received(self, sequence: Sequence) -> None:
        """The copies into a request's blocks have ended, or the transfer, or both."""
        start_token = sequence.computed
        if not (sequence.transfer_failed or sequence.load_failed):
            sequence.kv_arrived()
            self._pools.register(sequence, start_token, sequence.computed)
        elif sequence.transfer_failed and isinstance(sequence, Answer):
            if not sequence.ended:
                sequence.fail(TransferFailed("the KV cache did not arrive"))
        elif sequence.is_ready:
            self._begin_again(sequence)
        self._became_ready(sequence)
        self.update(sequence)

    def _begin_again(self, sequence: Sequence) -> None:
        """A request that lacks its KV gets other blocks. Those that may be written still are held."""
        self._pools.release(sequence.block_ids_by_group)
        self._tiers.request_preempted(sequence.transfer_id)
        sequence.blocks_lost()
        self._running.remove(sequence)
        self._waiting.appendleft(sequence)

    def _admit(self) -> None:
        for sequence in tuple(self._waiting):
            if len(self._running) >= self._shape.max_num_seqs:
                return
            found = self._pools.find(sequence)
            if found is None:
                continue
            if not self._pools.allocate(sequence):
                return
            self._waiting.remove(sequence)
            self._running.append(sequence)
            self._plan_arrival(sequence, found)
            self._became_ready(sequence)

    def _plan_arrival(self, sequence: Sequence, found: int) -> None:
        """A request has its blocks. Tiers have `found` tokens after those that are cached."""
        params, known = sequence.take_params(), len(sequence.tokens)
        missing = self.planner.missing_tokens(params, known, sequence.cached + found)
        name, blocks = sequence.transfer_id, sequence.block_ids_by_group
        sequence.kv_awaited(self._tiers.tier_tokens(name), missing)
        self._tiers.blocks_allocated(name, blocks[0], found)
        self._admitted = sequence
        self.planner.blocks_allocated(
            name, params, blocks, known, missing, sequence.first_token_received
        )
        if found and not missing:
            self.planner.send_before_running(name, partial(self._tiers.send_from_host, name))

    def _reserved(self, reservation: Reservation) -> None:
        """Blocks of the request that is admitted may be written by other workers, unless the reservation is empty."""
        sequence = self._admitted
        assert sequence is not None
        if isinstance(sequence, Answer):
            sequence.sink.put(reservation)
        elif isinstance(sequence, Prompt) and not sequence.starts_fetch(reservation):
            self.planner.transfer_settled(reservation.transfer_id, whole=False)
            self.wake()

    def _became_ready(self, sequence: Sequence) -> None:
        """It may be that a request waits for nothing more. Its cached KV is sent if it has nothing to compute."""
        if not isinstance(sequence, Prompt) or not sequence.is_ready:
            return
        is_computed = sequence.computed == len(sequence.tokens)
        if sequence.block_ids_by_group and (sequence.work.cached_only or is_computed):
            self._cached.append(sequence)
