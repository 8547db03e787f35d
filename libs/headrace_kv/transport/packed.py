"""Packs short runs on their way through a transport that is slow at them.

Short runs are gathered into staging memory, written in big pieces into slots of the peer's landing area, and put in
their places by the peer (scatter.proto). Three slots on either side let gathering, writing and scattering overlap.
Peers without an agent, or whose slots are all lent, are written to run by run.
"""

from __future__ import annotations

import concurrent.futures
import logging
import time
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from headrace_common.errors import TransferFailed
from headrace_kv.block_map import Runs
from headrace_kv.transport.base import KvTransport
from headrace_kv.transport.packing import by_length, gather
from headrace_kv.transport.ranges import MemoryRanges
from headrace_kv.transport.scatter_agent import LandingLimits, ScatterAgent
from headrace_kv.transport.scatter_lane import ScatterLane
from headrace_kv.transport.sessions import join_sessions, session_of

_log = logging.getLogger(__name__)

_AGENT = "scatter"
_ATTACH_TIMEOUT_S = 2.0
_LANE_LIMIT = 64
_RUNS_PER_SLOT = 65_536
_WRITE_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class PackingLimits:
    """What is packed: runs of up to `run_bytes`, when a write has `run_count` of them or more.

    A peer that lends no slots is asked again after `retry_s`.
    """

    run_bytes: int = 64 * 1024
    run_count: int = 32
    retry_s: float = 10.0
    landing: LandingLimits = field(default_factory=LandingLimits)


class PackedTransport(KvTransport):
    """Another transport with packing of short runs; takes host memory only."""

    entry_limit = 16_384

    def __init__(self, inner: KvTransport, host: str, limits: PackingLimits | None = None) -> None:
        self.name = inner.name
        self.quiet_after_failure_s = inner.quiet_after_failure_s
        self._inner = inner
        self._host = host
        self._limits = limits or PackingLimits()
        self._ranges = MemoryRanges()
        self._agent: ScatterAgent | None = None
        self._staging: np.ndarray[tuple[int], np.dtype[np.uint8]] | None = None
        self._gatherer = ThreadPoolExecutor(1, thread_name_prefix="kv-gather")
        self._lanes: OrderedDict[str, ScatterLane] = OrderedDict()
        self._refused_s: OrderedDict[str, float] = OrderedDict()
        self._closed = False
        self.packed_bytes = 0

    @property
    def session(self) -> str:
        if self._agent is None:
            self._agent = ScatterAgent(self._host, self._ranges, self._limits.landing)
            landing = self._agent.landing
            self._inner.register(int(landing.ctypes.data), landing.nbytes)
        return join_sessions({self.name: self._inner.session, _AGENT: self._agent.session})

    def register(self, base_address: int, nbytes: int) -> None:
        self._inner.register(base_address, nbytes)
        self._ranges.add(base_address, nbytes)

    def write(self, session: str, runs: Runs, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        short = (runs.lengths > 0) & (runs.lengths <= self._limits.run_bytes)
        lane = None
        if int(np.count_nonzero(short)) >= self._limits.run_count:
            lane = self._lane(session, timeout_s)
        if lane is None:
            self._inner.write(session, runs, timeout_s)
            return
        if not self._ranges.covers(runs.source_addresses, runs.lengths):
            raise TransferFailed("a source address is not registered")
        try:
            self._write_packed(lane, session, _select(runs, short), deadline_s)
        except BaseException:
            self._lanes.pop(session).close(clean=False)
            raise
        long = _select(runs, ~short)
        if len(long):
            self._inner.write(session, long, deadline_s - time.monotonic())

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for lane in self._lanes.values():
            lane.close(clean=True)
        self._lanes.clear()
        if self._agent is not None:
            self._agent.close()
        self._inner.close()
        self._gatherer.shutdown()

    def _write_packed(self, lane: ScatterLane, session: str, runs: Runs, deadline_s: float) -> None:
        landing = lane.landing
        chunks = list(runs.batches(_RUNS_PER_SLOT, landing.slot_bytes))
        sequences: list[int] = []
        staged = self._stage(0, chunks[0], landing.slot_bytes)
        for number in range(len(chunks)):
            slot = number % landing.slot_count
            chunk = staged.result()
            if number >= landing.slot_count:
                lane.wait(sequences[number - landing.slot_count], deadline_s)
            if number + 1 < len(chunks):
                following = (number + 1) % landing.slot_count
                staged = self._stage(following, chunks[number + 1], landing.slot_bytes)
            try:
                remaining_s = deadline_s - time.monotonic()
                big = self._big_runs(slot, landing.address, landing.slot_bytes, chunk)
                self._inner.write(session, big, remaining_s)
            except BaseException:
                # Nothing may read the source any more once this has failed.
                concurrent.futures.wait([staged])
                raise
            sequences.append(lane.submit(slot, chunk, deadline_s))
        lane.wait(sequences[-1], deadline_s)
        self.packed_bytes += runs.payload_bytes

    def _stage(self, slot: int, chunk: Runs, slot_bytes: int) -> Future[Runs]:
        """Gathers a chunk into a slot of staging; gives it back in the packed order."""
        staging = self._staging_slots(slot_bytes)
        return self._gatherer.submit(
            _gather, chunk, staging[slot * slot_bytes : (slot + 1) * slot_bytes]
        )

    def _staging_slots(self, slot_bytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        if self._staging is None:
            self._staging = np.empty(self._limits.landing.loan_bytes, np.uint8)
            self._inner.register(int(self._staging.ctypes.data), self._staging.nbytes)
        return self._staging

    def _big_runs(self, slot: int, landing: int, slot_bytes: int, chunk: Runs) -> Runs:
        assert self._staging is not None
        nbytes = chunk.payload_bytes
        offsets = np.arange(0, nbytes, _WRITE_BYTES, dtype=np.int64) + slot * slot_bytes
        ends = np.minimum(offsets + _WRITE_BYTES, slot * slot_bytes + nbytes)
        return Runs(int(self._staging.ctypes.data) + offsets, landing + offsets, ends - offsets)

    def _lane(self, session: str, timeout_s: float) -> ScatterLane | None:
        """The stream to a peer's agent; None when it has none or lends no slots."""
        lane = self._lanes.get(session)
        if lane is not None and not lane.broken:
            return lane
        if lane is not None:
            self._lanes.pop(session).close(clean=False)
        agent = session_of(_AGENT, session) if "=" in session else None
        now_s = time.monotonic()
        if agent is None or self._closed or self._refused_s.get(session, 0.0) > now_s:
            return None
        try:
            lane = ScatterLane(agent, min(timeout_s, _ATTACH_TIMEOUT_S))
            self._require_like(lane)
        except (TransferFailed, ValueError) as error:
            _log.info("short runs to %s go one by one: %s", agent.partition("/")[0], error)
            self._refused_s[session] = now_s + self._limits.retry_s
            if len(self._refused_s) > _LANE_LIMIT:
                self._refused_s.popitem(last=False)
            return None
        self._lanes[session] = lane
        if len(self._lanes) > _LANE_LIMIT:
            self._lanes.popitem(last=False)[1].close(clean=True)
        return lane

    def _require_like(self, lane: ScatterLane) -> None:
        ours, theirs = self._limits.landing, lane.landing
        if (theirs.slot_bytes, theirs.slot_count) != (ours.slot_bytes, ours.slots):
            lane.close(clean=True)
            raise TransferFailed("the peer's slots are not like ours")


def _gather(chunk: Runs, target: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> Runs:
    order = by_length(chunk.lengths)
    packed = chunk if order is None else _select(chunk, order)
    gather(packed.source_addresses, packed.lengths, target)
    return packed


def _select(runs: Runs, which: np.ndarray[tuple[int], np.dtype[np.generic]]) -> Runs:
    return Runs(
        runs.source_addresses[which], runs.destination_addresses[which], runs.lengths[which]
    )
