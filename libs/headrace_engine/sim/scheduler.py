"""The step loop of a sim engine, and the requests that it works on."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Items
from functools import partial

from headrace_common.deadlines import Deadline
from headrace_common.errors import (
    Draining,
    DuplicateTransfer,
    HeadraceError,
    InternalError,
    NotFound,
    TransferTimeout,
)
from headrace_engine.interface import RemotePrefix
from headrace_engine.sim.cache.pools import CachePools
from headrace_engine.sim.model.settings import SimShape
from headrace_engine.sim.sequence import Sequence
from headrace_engine.sim.stepper import Chunk, SimClock, Stepper, plan_step, step_of
from headrace_engine.step_budget import Answers, Prompt, prompt_budget
from headrace_engine.steps import EngineSteps, StepMeter
from headrace_kv.messages import Reservation

_logger = logging.getLogger(__name__)
_WAITING_PER_RUNNING = 4
_WAITING_MIN = 64


class Scheduler:
    """Owns the requests of one engine: which wait, which run, and when their blocks are freed.

    `run` is the step loop. All methods are called on its event loop. `on_steps` is called when a step begins, and when
    nothing is left to compute.
    """

    def __init__(
        self,
        shape: SimShape,
        pools: CachePools,
        stepper: Stepper,
        clock: SimClock,
        on_steps: Callable[[EngineSteps], None],
    ) -> None:
        self._shape = shape
        self._pools = pools
        self._stepper = stepper
        self._clock = clock
        self._waiting: deque[Sequence] = deque()
        self._running: deque[Sequence] = deque()
        self._by_id: dict[str, Sequence] = {}
        self._by_prefix: dict[str, Sequence] = {}
        self._loads: dict[str, asyncio.Task[None]] = {}
        # Blocks that may still be written into, by the transfer.
        self._detached: dict[str, tuple[tuple[int, ...], ...]] = {}
        self._work = asyncio.Event()
        self._closing = False
        self.meter = StepMeter()
        """Measures the steps."""
        self._on_steps = on_steps

    @property
    def running_count(self) -> int:
        """Requests that hold blocks."""
        return len(self._running)

    @property
    def waiting_count(self) -> int:
        """Requests that wait for blocks or for a place among the running ones."""
        return len(self._waiting)

    def find(self, transfer_id: str) -> Sequence | None:
        """The request of that transfer, or that fetches its prefix by it, until its blocks are freed."""
        return self._by_id.get(transfer_id) or self._by_prefix.get(transfer_id)

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
        if sequence.prefix_id:
            self._by_prefix[sequence.prefix_id] = sequence
        self._waiting.append(sequence)
        if self._pools.begin_fetch(sequence, partial(self._fetch_ended, sequence)):
            sequence.fetching_started()
        self._work.set()

    def fail(self, sequence: Sequence, failure: HeadraceError) -> None:
        """Ends a request with a failure."""
        sequence.fail(failure)
        self.update(sequence)

    def update(self, sequence: Sequence) -> None:
        """Must be called when a request has changed: frees its blocks if it needs them no more, and wakes the loop."""
        self._work.set()
        if not sequence.is_releasable or self._by_id.get(sequence.transfer_id) is not sequence:
            return
        del self._by_id[sequence.transfer_id]
        self._by_prefix.pop(sequence.prefix_id, None)
        for queue in (self._waiting, self._running):
            if sequence in queue:
                queue.remove(sequence)
        self._pools.free(sequence)

    async def run(self) -> None:
        """The step loop. Never returns. A step that fails unexpectedly fails all requests."""
        while True:
            try:
                if not await self._step():
                    self._work.clear()
                    self.meter.idle()
                    self._on_steps(self.meter.steps)
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
        """Frees blocks that a step held when `run` was cancelled."""
        for load in self._loads.values():
            load.cancel()
        for sequence in tuple(self._by_id.values()):
            self.update(sequence)

    async def _step(self) -> bool:
        """Admits requests and computes one step; False when there is nothing to compute."""
        chunks = self._plan()
        if not chunks:
            return False
        self.meter.planned(step_of(chunks), len(chunks))
        self._on_steps(self.meter.steps)
        try:
            await self._stepper.compute(chunks)
            self._stepper.advance(chunks)
        except InternalError as exc:
            for chunk in chunks:
                self.fail(chunk.sequence, exc)
        finally:
            self.meter.ended()
            self._stepper.end(chunks)
        for chunk in chunks:
            # The others need their blocks still.
            if chunk.sequence.ended:
                self.update(chunk.sequence)
        self._work.set()
        self._running.rotate(-1)
        return True

    def _plan(self) -> list[Chunk]:
        """Admits requests and plans a step."""
        self._admit()
        chunks = plan_step(
            [sequence for sequence in self._running if sequence.is_ready],
            self._shape.max_num_batched_tokens,
            self._shape.span_tokens,
            self._prompt_tokens_max,
        )
        self._stepper.begin(chunks)
        return chunks

    def _prompt_tokens_max(self, answers: Items[Chunk], prompts: Items[Sequence]) -> int | None:
        """See prompt_budget."""
        bounded = [one.sequence for one in answers if one.sequence.bounds.tpot_s]
        if not prompts or not bounded:
            return None
        now_s = self._clock.now_s()
        due = Answers(
            len(answers),
            sum(one.start for one in answers),
            [one.due_token(now_s) for one in bounded],
        )
        waiting = [Prompt(one.bounds, one.pending, one.computed) for one in prompts]
        return prompt_budget(now_s, self.meter.times, due, waiting)

    def _admit(self) -> None:
        while len(self._running) < self._shape.max_num_seqs:
            sequence = next((one for one in self._waiting if not one.fetching), None)
            if sequence is None or not self._pools.allocate(sequence):
                return
            self._waiting.remove(sequence)
            self._running.append(sequence)
            if sequence.cached_only and sequence.pending:
                self.fail(sequence, NotFound("some of the KV is not cached"))
                continue
            self._stepper.push_from_host(sequence)
            load_s = sequence.loaded * self._shape.settings.host_copy_s_per_token
            if load_s:
                sequence.loading_started()
                self._start_load(sequence, self._clock.now_s() + load_s)
            elif sequence.handover is not None:
                self._stepper.push_cached(sequence)
            if sequence.generation is not None and sequence.generation.remote_kv:
                self._reserve(sequence, sequence.generation.transferable_tokens)
            elif sequence.prefix is not None:
                self._fetch_prefix(sequence, sequence.prefix)

    def _fetch_prefix(self, sequence: Sequence, prefix: RemotePrefix) -> None:
        """Has the KV fetched that a prompt lacks, if there is any and the source agrees."""
        end = prefix.end_token
        usable = sequence.cached < end <= sequence.reusable_tokens(self._pools.keeps_state)
        # Blocks that are sent from main memory belong to these blocks.
        if usable and not sequence.host_blocks and prefix.start(self._reservation(sequence, end)):
            sequence.prefix_awaited()

    def recompute(self, sequence: Sequence) -> None:
        """Lets a request begin again in other blocks. Those that it has are held until `free_detached`."""
        self._detached[sequence.prefix_id] = sequence.blocks_detached()
        self._running.remove(sequence)
        self._waiting.appendleft(sequence)
        self._work.set()

    def free_detached(self, transfer_id: str) -> None:
        """Nothing writes into the blocks that a request had to leave. Without such blocks it does nothing."""
        self._pools.free_blocks(self._detached.pop(transfer_id, ()))
        self._work.set()

    async def wait_loaded(self, deadline_s: float) -> None:
        """Returns when the blocks of main memory that are being copied may be used. Raises TransferTimeout before."""
        loads = tuple(self._loads.values())
        if loads and (await asyncio.wait(loads, timeout=Deadline(deadline_s).remaining_s()))[1]:
            raise TransferTimeout("cached KV was not loaded in time")

    def _fetch_ended(self, sequence: Sequence) -> None:
        """The remote pool has given what it could."""
        sequence.fetching_ended()
        self._work.set()

    def _start_load(self, sequence: Sequence, due_s: float) -> None:
        load = asyncio.create_task(self._load(sequence, due_s))
        name = sequence.transfer_id
        self._loads[name] = load

        def forget(ended: asyncio.Task[None]) -> None:
            if self._loads.get(name) is ended:
                del self._loads[name]

        load.add_done_callback(forget)

    async def _load(self, sequence: Sequence, due_s: float) -> None:
        """Makes blocks from main memory usable when their simulated copy ends."""
        await self._clock.sleep_until(due_s)
        sequence.loading_finished()
        if sequence.handover is not None and sequence.is_ready:
            self._stepper.push_cached(sequence)
        self._work.set()

    def _reserve(self, sequence: Sequence, end_token: int) -> None:
        sequence.blocks_reserved(self._reservation(sequence, end_token))

    def _reservation(self, sequence: Sequence, end_token: int) -> Reservation:
        """Its blocks for the tokens that are not cached."""
        start = sequence.cached
        first, *further = self._pools.blocks_between(sequence, start, end_token)
        return Reservation(
            sequence.prefix_id or sequence.transfer_id, first, start, end_token, tuple(further)
        )
