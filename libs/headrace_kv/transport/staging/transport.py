"""Arranges runs before or after they cross a transport, where that is cheaper than to send them one by one.

Before: runs are gathered into staging memory in the receiver's order, and written to their places in long entries.
After: they are written as they lie into slots of the peer's landing area, and the peer puts them in their places
(scatter.proto). Both: gathered, landed and put in place. The cost model (costs.py) chooses. Slots on either side let
gathering, writing and scattering overlap within a write and from one to the next.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from headrace_common.errors import HeadraceError, TransferFailed
from headrace_kv.plan.copy_plan import Int64Array, Runs
from headrace_kv.transport.base import KvTransport, Strategy, WriteResult, ended, failed
from headrace_kv.transport.memory import HOST_MEMORY, Memory
from headrace_kv.transport.packing import Bytes
from headrace_kv.transport.ranges import MemoryRanges
from headrace_kv.transport.sessions import join_sessions, session_of
from headrace_kv.transport.staging.cost_model import WireCosts
from headrace_kv.transport.staging.scatter_client import LaneWatch, ScatterLane
from headrace_kv.transport.staging.scatter_server import LandingLimits, ScatterAgent
from headrace_kv.transport.staging.slots import Slots
from headrace_kv.transport.staging.strategy import Arrangements, StagingPlan, select
from headrace_kv.transport.staging.write import StagedWrite

_log = logging.getLogger(__name__)

# How a session names the agent: of memory that can be written to directly too, and of memory that cannot.
_AGENT, _ONLY_AGENT = "scatter", "landing"
_ATTACH_TIMEOUT_S = 2.0
_SCATTER_TIMEOUT_S = 10.0
_LANE_LIMIT = 64
_RUNS_PER_SLOT = 65_536


@dataclass(frozen=True, slots=True)
class StagingLimits:
    """Staging has `staging_slots` of the landing area's size; more than a peer lends, so that no peer holds them all.

    A peer that lends no slots is asked again after `retry_s`.
    """

    landing: LandingLimits = field(default_factory=LandingLimits)
    staging_slots: int = 6
    retry_s: float = 10.0


class StagedTransport(KvTransport):
    """Another transport, whose runs may be staged.

    Device memory that it cannot reach (`memory.staged`) always is. What it reaches goes as it lies wherever the peer's
    memory can be written to: to gather it would cost the device's time.
    """

    entry_limit = 16_384

    def __init__(
        self,
        inner: KvTransport,
        host: str,
        costs: WireCosts,
        limits: StagingLimits | None = None,
        *,
        memory: Memory = HOST_MEMORY,
    ) -> None:
        self.name = inner.name
        self.quiet_after_failure_s = inner.quiet_after_failure_s
        self._inner = inner
        self._host = host
        self._limits = limits or StagingLimits()
        self.memory = memory
        self.byte_limit = self._limits.landing.loan_bytes
        self.pending_limit = self._limits.landing.slots
        self._ranges = MemoryRanges()
        self._agent: ScatterAgent | None = None
        self._staging: Bytes | None = None
        self._staging_slots = Slots(self._limits.staging_slots)
        self._arrangements = Arrangements(costs)
        self._watch = LaneWatch()
        self._lanes: OrderedDict[str, ScatterLane] = OrderedDict()
        self._refused_s: OrderedDict[str, float] = OrderedDict()
        self._closed = False

    @property
    def session(self) -> str:
        if self._agent is None:
            landing = self._limits.landing
            self._agent = ScatterAgent(self._host, self._ranges, landing, self.memory)
            area = self._agent.landing
            self._inner.register(int(area.ctypes.data), area.nbytes)
        agent = _ONLY_AGENT if self.memory.staged else _AGENT
        return join_sessions({self.name: self._inner.session, agent: self._agent.session})

    def register(self, base_address: int, nbytes: int) -> None:
        self.memory.admit(base_address, nbytes)
        if not self.memory.staged:
            self._inner.register(base_address, nbytes)
        self._ranges.add(base_address, nbytes)

    def route(self, session: str) -> str:
        return self._inner.route(session)

    def write(self, session: str, runs: Runs, timeout_s: float) -> WriteResult:
        return ended(self.submit(session, runs, timeout_s), timeout_s)

    def submit(self, session: str, runs: Runs, timeout_s: float) -> Future[WriteResult]:
        deadline_s = time.monotonic() + timeout_s
        if self._closed:
            return failed(TransferFailed("the transport is closed"))
        if timeout_s <= 0.0:
            return failed(TransferFailed("no time is left for this write"))
        if not self._ranges.covers(runs.source_addresses, runs.lengths):
            return failed(TransferFailed("a source address is not registered"))
        if not (runs.lengths > 0).all():
            runs = select(runs, np.flatnonzero(runs.lengths))
        try:
            arrangement, lane = self._choose(session, runs, timeout_s)
        except TransferFailed as error:
            return failed(error)
        write = StagedWrite(arrangement.strategy, self._inner.name)
        try:
            self._start(write, session, arrangement, lane, runs, deadline_s)
        except HeadraceError as error:
            write.end(error)
        except BaseException as error:
            write.end(TransferFailed(f"staging met a bug: {error}"))
            raise
        else:
            write.end(None)
        return write.future

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        # What is under way fails; afterwards nobody uses a lane any more.
        self._inner.close()
        for lane in self._lanes.values():
            self._watch.discard(lane)
            lane.close(clean=lane.end_s is None)
        self._lanes.clear()
        self._watch.close()
        if self._agent is not None:
            self._agent.close()

    def _choose(
        self, session: str, runs: Runs, timeout_s: float
    ) -> tuple[StagingPlan, ScatterLane | None]:
        """The cheapest way there is to this peer, and the lane that it needs."""
        agent, direct = _agent_of(session)
        if direct and not self.memory.staged and not self.memory.on_host:
            return StagingPlan("direct", None, None), None
        allowed: set[Strategy] = {"gather"} if direct else set()
        if direct and not self.memory.staged:
            allowed.add("direct")
        landing: set[Strategy] = (
            {"gather_scatter"} if self.memory.staged else {"scatter", "gather_scatter"}
        )
        if agent and (session in self._lanes or not self._refused(session)):
            arrangement = self._arrangements.choose(runs, frozenset(allowed | landing))
            if arrangement.strategy not in landing:
                return arrangement, None
            lane = self._lane(session, agent, timeout_s)
            if lane is not None:
                return arrangement, lane
        if not allowed:
            raise TransferFailed(
                "the peer lends no landing slots, which its memory cannot do without"
            )
        return self._arrangements.choose(runs, frozenset(allowed)), None

    def _start(
        self,
        write: StagedWrite,
        session: str,
        arrangement: StagingPlan,
        lane: ScatterLane | None,
        runs: Runs,
        deadline_s: float,
    ) -> None:
        if arrangement.strategy == "direct":
            self._send(write, session, runs, deadline_s, write.end)
            return
        if arrangement.alone is not None:
            self._send(write, session, select(runs, arrangement.alone), deadline_s, write.end)
        short = runs if arrangement.order is None else select(runs, arrangement.order)
        for chunk in short.batches(_RUNS_PER_SLOT, self._limits.landing.slot_bytes):
            if write.failed:
                return
            if lane is None:
                self._put_before(write, session, chunk, deadline_s)
            else:
                gathered = arrangement.strategy == "gather_scatter"
                self._put_after(write, session, chunk, deadline_s, lane, gathered)

    def _put_before(self, write: StagedWrite, session: str, chunk: Runs, deadline_s: float) -> None:
        slot = self._staging_slots.take(deadline_s)
        release = partial(self._staging_slots.give, slot)
        staged = self._gather(slot, chunk, release)
        entries = Runs(staged, chunk.destination_addresses, chunk.lengths).merge()
        self._send(write, session, entries, deadline_s, _then(release, write.end))

    def _put_after(
        self,
        write: StagedWrite,
        session: str,
        chunk: Runs,
        deadline_s: float,
        lane: ScatterLane,
        gathered: bool,
    ) -> None:
        landing_slot = lane.slots.take(deadline_s)
        landing = lane.landing.address + landing_slot * lane.landing.slot_bytes

        def landed(error: HeadraceError | None) -> None:
            if error is None:
                # A slot's worth of copying takes milliseconds: a peer that stands still need not cost the whole time.
                answer_s = min(deadline_s, time.monotonic() + _SCATTER_TIMEOUT_S)
                lane.submit(landing_slot, chunk, answer_s, write.end)
                return
            # Nobody knows what lands in the slot now: the peer must not lend it for a while.
            lane.break_off(f"a write to its slots failed: {error.detail}")
            write.end(error)

        if not gathered:
            landings = _packed(landing, chunk.lengths)
            entries = Runs(chunk.source_addresses, landings, chunk.lengths).merge()
            self._send(write, session, entries, deadline_s, landed)
            return
        try:
            slot = self._staging_slots.take(deadline_s)
            release = partial(self._staging_slots.give, slot)
            staged = self._gather(slot, chunk, release)
        except BaseException:
            lane.slots.give(landing_slot)
            raise
        entries = self._long_entries(int(staged[0]), landing, chunk.payload_bytes)
        self._send(write, session, entries, deadline_s, _then(release, landed))

    def _gather(self, slot: int, chunk: Runs, release: Callable[[], None]) -> Int64Array:
        """Gathers a chunk into a slot of staging; returns where each run is."""
        slot_bytes = self._limits.landing.slot_bytes
        try:
            if self._staging is None:
                self._staging = self.memory.allocate(self._limits.staging_slots * slot_bytes)
                self._inner.register(int(self._staging.ctypes.data), self._staging.nbytes)
            part = self._staging[slot * slot_bytes : (slot + 1) * slot_bytes]
            self.memory.gather(chunk.source_addresses, chunk.lengths, part)
        except BaseException:
            release()
            raise
        return _packed(int(part.ctypes.data), chunk.lengths)

    def _send(
        self,
        write: StagedWrite,
        session: str,
        entries: Runs,
        deadline_s: float,
        on_end: Callable[[HeadraceError | None], None],
    ) -> None:
        """Gives entries to the inner transport; `on_end` is told once."""
        write.begin()
        start_s = time.monotonic()
        try:
            future = self._inner.submit(session, entries, deadline_s - start_s)
        except Exception as error:  # noqa: BLE001 - an outcome like any other
            future = failed(TransferFailed(f"writing met a bug: {error}"))
        nbytes = entries.payload_bytes

        def done(future: Future[WriteResult]) -> None:
            error = future.exception()
            if error is None:
                written = future.result()
                self._arrangements.observe(written.entry_count, nbytes, start_s)
                write.note(written)
            elif not isinstance(error, HeadraceError):
                error = TransferFailed(f"writing met a bug: {error}")
            on_end(error)

        future.add_done_callback(done)

    def _long_entries(self, source: int, destination: int, nbytes: int) -> Runs:
        step = self._arrangements.costs.staged_entry_bytes
        offsets = np.arange(0, nbytes, step, dtype=np.int64)
        return Runs(source + offsets, destination + offsets, np.minimum(nbytes - offsets, step))

    def _lane(self, session: str, agent: str, timeout_s: float) -> ScatterLane | None:
        """The stream to a peer's agent; None when it lends no slots."""
        lane = self._lanes.get(session)
        if lane is not None and not lane.broken:
            return lane
        if lane is not None:
            self._end_lane(session, clean=False)
        if self._refused(session):
            return None
        try:
            lane = ScatterLane(agent, min(timeout_s, _ATTACH_TIMEOUT_S), self._watch.wake)
            self._require_like(lane)
        except (TransferFailed, ValueError) as error:
            _log.info("runs to %s cannot be staged there: %s", agent.partition("/")[0], error)
            self._refused_s[session] = time.monotonic() + self._limits.retry_s
            if len(self._refused_s) > _LANE_LIMIT:
                self._refused_s.popitem(last=False)
            return None
        self._lanes[session] = lane
        self._watch.add(lane)
        if len(self._lanes) > _LANE_LIMIT:
            oldest = next(iter(self._lanes))
            self._end_lane(oldest, clean=self._lanes[oldest].end_s is None)
        return lane

    def _refused(self, session: str) -> bool:
        return self._refused_s.get(session, 0.0) > time.monotonic()

    def _require_like(self, lane: ScatterLane) -> None:
        ours, theirs = self._limits.landing, lane.landing
        if (theirs.slot_bytes, theirs.slot_count) != (ours.slot_bytes, ours.slots):
            lane.close(clean=True)
            raise TransferFailed("the peer's slots are not like ours")

    def _end_lane(self, session: str, *, clean: bool) -> None:
        lane = self._lanes.pop(session)
        self._watch.discard(lane)
        lane.close(clean=clean)


def _agent_of(session: str) -> tuple[str, bool]:
    """The agent in a peer's session, if any, and whether its memory can be written to without."""
    if "=" not in session:
        return "", True
    only = session_of(_ONLY_AGENT, session)
    return (only, False) if only else (session_of(_AGENT, session) or "", True)


def _packed(first: int, lengths: Int64Array) -> Int64Array:
    """Addresses of runs that lie one after the other."""
    return first + np.cumsum(lengths) - lengths


def _then(
    release: Callable[[], None], on_end: Callable[[HeadraceError | None], None]
) -> Callable[[HeadraceError | None], None]:
    def both(error: HeadraceError | None) -> None:
        release()
        on_end(error)

    return both
