"""A worker of a chaos run: its messages are lost, duplicated and delayed, and its free blocks are checked.

Started as `python -m tests.chaos.worker SERVICE FLAGS`. HEADRACE_CHAOS holds the WireFaults as JSON. In the folder
HEADRACE_CHAOS_REPORTS, one file gets a line for every foreign write, and another for every block that is lost. Others
count the faults of messages, the blocks copied between tiers, and the blocks of lower tiers that are held.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import grpc.aio

import headrace_common.logs
import headrace_decode.attempts
import headrace_decode.main
import headrace_engine.connector.pool_planner
import headrace_engine.prefix_event_log
import headrace_engine.sim.engine
import headrace_engine.worker.receiving
import headrace_kv.receive.receiver
import headrace_kv.receive.transfer
import headrace_kv.tiers.pool
import headrace_kv.transport.factory
import headrace_prefill.main
import headrace_prefill.pull
import headrace_worker.main
from headrace.kv.v1 import handoff_pb2
from headrace.prefill.v1 import prefill_pb2
from headrace_common.errors import ProtocolViolation, WorkerGone
from headrace_common.process.kill_timer import KillTimer
from headrace_decode.admission import SeenTransfers
from headrace_engine.sim.engine import SimEngine
from headrace_kv.copy_plan import Runs
from headrace_kv.layout import KvLayout
from headrace_kv.leases import QuarantinePolicy, WriteLease
from headrace_kv.messages import Reservation
from headrace_kv.receive.ledger import Ledger
from headrace_kv.receive.receiver import ReceiverLimits
from headrace_kv.receive.service import HandoffServicer, unpacked
from headrace_kv.send.transfer import OutgoingTransfers
from headrace_kv.shard_map import Key
from headrace_kv.transport.base import KvTransport, WriteResult
from headrace_kv.transport.factory import open_transport
from headrace_kv.transport.guard import Address, Networks
from headrace_kv.transport.scatter import StagingLimits
from headrace_prefill.pull import PullSession
from tests.chaos import pool_process, tiers
from tests.chaos.hostile import Lies
from tests.chaos.plan import WireFaults
from tests.chaos.tiers import TierHolds, held_file, put
from tests.sim_blocks import guard_violations

# Without these messages a stream does not start or a credit is lost forever. No real fault loses only them.
NEVER_LOST = frozenset({"hello", "welcome", "credit"})
_HISTORY_MAX = 512
_SLOT_BYTES = 128 * 1024


class Dice:
    """Draws the fate of each message, for all streams of the process."""

    def __init__(self, faults: WireFaults, lies: Lies | None = None) -> None:
        self.lies = lies
        """Those of a hostile worker."""
        self._faults = faults
        self._random = random.Random(f"{faults.seed}/{os.getpid()}")
        self.counts: Counter[str] = Counter()

    async def copies(self, kind: str | None) -> int:
        """Returns how often the message is delivered, after a pause if it is delayed."""
        faults = self._faults
        if self._random.random() < faults.delayed:
            self.counts["held up"] += 1
            await asyncio.sleep(self._random.uniform(0, faults.delay_max_s))
        if kind in NEVER_LOST:
            return 1
        drawn = self._random.random()
        if drawn < faults.lost:
            self.counts["lost"] += 1
            return 0
        if drawn < faults.lost + faults.doubled:
            self.counts["doubled"] += 1
            return 2
        return 1

    async def next_or_cut(
        self, requests: AsyncIterator[handoff_pb2.HandoffRequest]
    ) -> handoff_pb2.HandoffRequest | None:
        """Returns the next message of the stream, None at its end. Raises WorkerGone where chaos ends the stream."""
        silence_s = self._faults.cut_after_silence_s or None
        if self._random.random() >= self._faults.cut:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(silence_s):
                    return await anext(requests, None)
        self.counts["streams cut"] += 1
        raise WorkerGone("chaos has cut this stream")

    def changes_disk(self) -> bool:
        """Draws whether a block on disk has changed."""
        return self._random.random() < self._faults.disk_changed

    def dawdle(self, most_s: float) -> float:
        """Draws a pause in seconds."""
        return self._random.uniform(0, most_s)


class LossyContext:
    """The answers of a handoff stream on their way to a prefill rank."""

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any], dice: Dice) -> None:
        self._context = context
        self._dice = dice

    async def write(self, response: handoff_pb2.HandoffResponse) -> None:
        lies = self._dice.lies
        for told in (response,) if lies is None else lies.answers(response):
            for _ in range(await self._dice.copies(told.WhichOneof("message"))):
                await self._context.write(told)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


def lossy_handoffs(dice: Dice) -> type[HandoffServicer]:
    """The service of a receiving worker with faults in the messages of both directions."""

    async def through(
        requests: AsyncIterator[handoff_pb2.HandoffRequest],
    ) -> AsyncIterator[handoff_pb2.HandoffRequest]:
        while (request := await dice.next_or_cut(requests)) is not None:
            if dice.lies is not None and request.HasField("hello"):
                dice.lies.senders.add((request.hello.worker_id, request.hello.incarnation))
            for each in unpacked(request):
                for _ in range(await dice.copies(each.WhichOneof("message"))):
                    yield each

    class LossyHandoffs(HandoffServicer):
        async def Handoff(  # type: ignore[override]
            self,
            request_iterator: AsyncIterator[handoff_pb2.HandoffRequest],
            context: grpc.aio.ServicerContext[Any, Any],
        ) -> None:
            lossy: Any = LossyContext(context, dice)
            await super().Handoff(through(request_iterator), lossy)

    return LossyHandoffs


def lossy_pulls(dice: Dice) -> type[PullSession]:
    """The prefill worker's stream to the router, with faults in its messages."""

    class LossyPulls(PullSession):
        async def _requests(self) -> AsyncIterator[prefill_pb2.PullRequest]:
            async for request in super()._requests():
                batched = request.batch.requests if request.HasField("batch") else (request,)
                for each in batched:
                    for told in (each,) if dice.lies is None else dice.lies.reports(each):
                        for _ in range(await dice.copies(told.WhichOneof("message"))):
                            yield told

    return LossyPulls


class SlowWrites(KvTransport):
    """A transport with writes that land late, as on a congested network."""

    def __init__(self, inner: KvTransport, dice: Dice, most_s: float) -> None:
        self.name = inner.name
        self.quiet_after_failure_s = inner.quiet_after_failure_s
        self.entry_limit, self.byte_limit = inner.entry_limit, inner.byte_limit
        self._inner = inner
        self._dice = dice
        self._most_s = most_s

    @property
    def session(self) -> str:
        return self._inner.session

    def register(self, base_address: int, nbytes: int) -> None:
        self._inner.register(base_address, nbytes)

    def admit(self, networks: Networks | None) -> None:
        self._inner.admit(networks)

    def source_addresses(self, sessions: Collection[str]) -> frozenset[Address]:
        return self._inner.source_addresses(sessions)

    def submit(self, session: str, runs: Runs, timeout_s: float) -> Future[WriteResult]:
        time.sleep(self._dice.dawdle(self._most_s))
        return self._inner.submit(session, runs, timeout_s)

    def close(self) -> None:
        self._inner.close()


def slow_down(faults: WireFaults, dice: Dice) -> None:
    """Delays a prefill worker's writes, before or after the lease check."""
    if faults.slow_write_max_s:
        open_fast = open_transport

        def open_slow(kind: str, host: str, **settings: Any) -> KvTransport:
            return SlowWrites(open_fast(kind, host, **settings), dice, faults.slow_write_max_s)

        put(headrace_engine.sim.engine, "open_transport", open_slow)
    if faults.slow_turn_max_s:
        write = OutgoingTransfers._start

        def dawdle(transfers: OutgoingTransfers, *arguments: Any) -> None:
            time.sleep(dice.dawdle(faults.slow_turn_max_s))
            write(transfers, *arguments)

        put(OutgoingTransfers, "_start", dawdle)


class CountingLedger(Ledger):
    """Counts tokens as often as they are announced, as a ledger without a set would."""

    def __init__(self, layout: KvLayout, prefill: KvLayout, reservation: Reservation) -> None:
        super().__init__(layout, prefill, reservation)
        self._awaited = len(self._missing) * (reservation.end_token - reservation.start_token)

    def land(self, key: Key, start_token: int, end_token: int, payload_bytes: int) -> bool:
        self._awaited -= end_token - start_token
        landed = False
        with contextlib.suppress(ProtocolViolation):
            landed = super().land(key, start_token, end_token, payload_bytes)
        if self._awaited <= 0:
            self._missing.clear()
        return landed


def break_part(name: str) -> None:
    """Switches one safeguard off, so that a run can show that its loss is detected."""
    match name:
        case "":
            pass
        case "quarantine":
            put(QuarantinePolicy, "total_s", property(lambda policy: 0.0))
        case "lease":
            put(WriteLease, "alive", lambda lease, now_s: True)
            put(WriteLease, "remaining_s", lambda lease, now_s: 3600.0)
            put(KillTimer, "set", lambda timer, owner, deadline_s: None)
        case "kill_timer":
            put(KillTimer, "set", lambda timer, owner, deadline_s: None)
        case "ledger":
            put(headrace_kv.receive.transfer, "Ledger", CountingLedger)
        case "pool_seal":
            # Its process of the pool switches it off.
            pass
        case _:
            raise SystemExit(f"there is no safeguard named {name}")


def shrink_memories() -> None:
    """Bounds memories of the last requests, transfers or events, staging memory, and connections to a peer.

    A rank allocates staging memory with its first staged write, perhaps late in a run. A worker announces the blocks
    that it has stored in a remote pool, and routers index them. In a soak it stores a few thousand in a minute, so both
    would grow for half an hour. Mooncake opens a further connection to a peer when writes to it coincide, up to one
    for each lane. With one lane, the first write opens the only connection.
    """
    os.environ["MC_TCP_LANES_PER_PEER"] = "1"
    put(headrace_common.logs, "NAMES_MAX", _HISTORY_MAX)
    put(headrace_engine.prefix_event_log, "REPLAY_EVENTS_MAX", _HISTORY_MAX)
    put(headrace_engine.connector.pool_planner, "ANNOUNCED_MAX", _HISTORY_MAX)
    put(headrace_decode.attempts, "SeenTransfers", partial(SeenTransfers, _HISTORY_MAX))
    put(
        headrace_kv.receive.receiver,
        "ReceiverLimits",
        partial(ReceiverLimits, remembered=_HISTORY_MAX),
    )
    limits = partial(StagingLimits, slot_bytes=_SLOT_BYTES)
    put(headrace_kv.transport.factory, "StagingLimits", limits)


def report_on(folder: Path, service: str, dice: Dice, holds: TierHolds, interval_s: float) -> None:
    """Makes every engine that starts check its blocks, and records the fates of messages and copies between tiers."""
    start: Callable[[SimEngine], Awaitable[None]] = SimEngine.start
    tasks: set[asyncio.Task[None]] = set()
    tier_counts = tiers.count_copies(dice.changes_disk)

    async def watch(engine: SimEngine) -> None:
        told: set[tuple[int, int]] = set()
        counts = folder / f"wire-{os.getpid()}.json"
        copied = folder / f"tiers-{os.getpid()}.json"
        lost: set[str] = set()
        while True:
            found = set(guard_violations(engine))
            if found - told:
                with (folder / f"foreign-{os.getpid()}.jsonl").open("a", encoding="utf-8") as file:
                    file.write(
                        json.dumps({"service": service, "blocks": sorted(found - told)}) + "\n"
                    )
            told |= found
            counts.write_text(json.dumps(dice.counts), encoding="utf-8")
            unconserved = set(tiers.unconserved_blocks(engine, holds))
            if unconserved - lost:
                with (folder / f"unconserved-{os.getpid()}.txt").open(
                    "a", encoding="utf-8"
                ) as file:
                    file.writelines(f"{service}: {line}\n" for line in sorted(unconserved - lost))
            lost |= unconserved
            copied.write_text(json.dumps(tier_counts), encoding="utf-8")
            # An idle engine finds the promises that have ended with its next step.
            if engine._pools.tiers is not None:
                engine._pools.tiers.promises.expire()
            held_file(folder, os.getpid()).write_text(str(holds.count), encoding="utf-8")
            await asyncio.sleep(interval_s)

    async def started(engine: SimEngine) -> None:
        await start(engine)
        tasks.add(asyncio.create_task(watch(engine), name="guard watch"))

    put(SimEngine, "start", started)


def main() -> None:
    service = sys.argv.pop(1)
    faults = WireFaults(**json.loads(os.environ["HEADRACE_CHAOS"]))
    reports = Path(os.environ["HEADRACE_CHAOS_REPORTS"])
    lies = Lies(faults.seed, reports) if faults.hostile else None
    dice = Dice(faults, lies)
    holds = TierHolds()
    holds.install()
    break_part(faults.break_part)
    if faults.small_memories:
        shrink_memories()
    put(headrace_kv.tiers.pool, "_MODULE", pool_process.MODULE)
    if lies is not None:
        lies.install()
    else:
        report_on(reports, service, dice, holds, faults.watch_interval_s)
    put(headrace_engine.worker.receiving, "HandoffServicer", lossy_handoffs(dice))
    if service == "decode":
        headrace_decode.main.main()
    elif service == "worker":
        slow_down(faults, dice)
        put(headrace_prefill.pull, "PullSession", lossy_pulls(dice))
        headrace_worker.main.main()
    else:
        slow_down(faults, dice)
        put(headrace_prefill.pull, "PullSession", lossy_pulls(dice))
        headrace_prefill.main.main()


if __name__ == "__main__":
    main()
