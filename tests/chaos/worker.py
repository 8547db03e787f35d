"""A worker of a chaos run: its messages get lost, doubled and held up, and its free blocks are watched.

Started as `python -m tests.chaos.worker SERVICE FLAGS`; HEADRACE_CHAOS holds the WireFaults as JSON. In the
folder HEADRACE_CHAOS_REPORTS, one file gets a line for every foreign write and another counts the messages' faults.
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
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc.aio

import headrace_decode.main
import headrace_engine.sim.engine
import headrace_kv.receive.transfer
import headrace_prefill.main
import headrace_prefill.puller
from headrace.kv.v1 import handoff_pb2
from headrace.prefill.v1 import prefill_pb2
from headrace_common.errors import ProtocolViolation, WorkerGone
from headrace_engine.sim.engine import SimEngine
from headrace_kv.handoff.leases import QuarantinePolicy, WriteLease
from headrace_kv.handoff.messages import Reservation
from headrace_kv.layout.layout import KvLayout
from headrace_kv.plan.copy_plan import Runs
from headrace_kv.plan.shard_map import Key
from headrace_kv.receive.ledger import Ledger
from headrace_kv.receive.service import HandoffServicer
from headrace_kv.send.write_scheduler import WriteScheduler
from headrace_kv.transport.base import KvTransport, WriteResult
from headrace_kv.transport.factory import open_transport
from headrace_prefill.pull_session import PullSession
from tests.chaos.plan import WireFaults

# A stream without these has not begun, and a credit that is lost is lost for ever: no real fault loses only these.
NEVER_LOST = frozenset({"hello", "welcome", "credit"})


def put(owner: Any, name: str, value: object) -> None:
    """Sets an attribute of a product's class or module; it is how this process differs from a real worker."""
    setattr(owner, name, value)


class Dice:
    """What happens to each message; one for all streams of the process."""

    def __init__(self, faults: WireFaults) -> None:
        self._faults = faults
        self._random = random.Random(f"{faults.seed}/{os.getpid()}")
        self.counts: Counter[str] = Counter()

    async def copies(self, kind: str | None) -> int:
        """How often the message gets through, after a pause if it is held up."""
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
        """The stream's next message, None at its end. Raises WorkerGone where chaos ends it."""
        silence_s = self._faults.cut_after_silence_s or None
        if self._random.random() >= self._faults.cut:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(silence_s):
                    return await anext(requests, None)
        self.counts["streams cut"] += 1
        raise WorkerGone("chaos has cut this stream")

    def dawdle(self, most_s: float) -> float:
        """Seconds of a pause."""
        return self._random.uniform(0, most_s)


class LossyContext:
    """A handoff stream's answers on their way to a prefill rank."""

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any], dice: Dice) -> None:
        self._context = context
        self._dice = dice

    async def write(self, response: handoff_pb2.HandoffResponse) -> None:
        for _ in range(await self._dice.copies(response.WhichOneof("message"))):
            await self._context.write(response)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


def lossy_handoffs(dice: Dice) -> type[HandoffServicer]:
    """The decode worker's service, hearing and saying less than it should."""

    async def through(
        requests: AsyncIterator[handoff_pb2.HandoffRequest],
    ) -> AsyncIterator[handoff_pb2.HandoffRequest]:
        while (request := await dice.next_or_cut(requests)) is not None:
            for _ in range(await dice.copies(request.WhichOneof("message"))):
                yield request

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
    """The prefill worker's stream, saying less to the router than it should."""

    class LossyPulls(PullSession):
        async def _requests(self) -> AsyncIterator[prefill_pb2.PullRequest]:
            async for request in super()._requests():
                for _ in range(await dice.copies(request.WhichOneof("message"))):
                    yield request

    return LossyPulls


class SlowWrites(KvTransport):
    """A transport whose writes take their time to land, as on a congested network."""

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

    def write(self, session: str, runs: Runs, timeout_s: float) -> WriteResult:
        time.sleep(self._dice.dawdle(self._most_s))
        return self._inner.write(session, runs, timeout_s)

    def close(self) -> None:
        self._inner.close()


def slow_down(faults: WireFaults, dice: Dice) -> None:
    """Makes a prefill worker's writes slow, before or after the lease is looked at."""
    if faults.slow_write_max_s:
        open_fast = open_transport

        def open_slow(kind: str, host: str) -> KvTransport:
            return SlowWrites(open_fast(kind, host), dice, faults.slow_write_max_s)

        put(headrace_engine.sim.engine, "open_transport", open_slow)
    if faults.slow_turn_max_s:
        write = WriteScheduler._start_batch

        def dawdle(scheduler: WriteScheduler, *arguments: Any) -> None:
            time.sleep(dice.dawdle(faults.slow_turn_max_s))
            write(scheduler, *arguments)

        put(WriteScheduler, "_start_batch", dawdle)


class CountingLedger(Ledger):
    """Counts tokens however often they are announced, as a ledger that is no set would."""

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
    """Takes one safeguard away, so that the run can show that it would be missed."""
    match name:
        case "":
            pass
        case "quarantine":
            put(QuarantinePolicy, "total_s", property(lambda policy: 0.0))
        case "lease":
            put(WriteLease, "alive", lambda lease, now_s: True)
            put(WriteLease, "remaining_s", lambda lease, now_s: 3600.0)
        case "ledger":
            put(headrace_kv.receive.transfer, "Ledger", CountingLedger)
        case _:
            raise SystemExit(f"there is no safeguard named {name}")


def report_on(folder: Path, service: str, dice: Dice, interval_s: float) -> None:
    """From now on every engine that starts looks after its free blocks, and the messages' fates are noted."""
    start: Callable[[SimEngine], Awaitable[None]] = SimEngine.start
    tasks: set[asyncio.Task[None]] = set()

    async def watch(engine: SimEngine) -> None:
        told: set[tuple[int, int]] = set()
        counts = folder / f"wire-{os.getpid()}.json"
        while True:
            found = set(engine.guard_violations())
            if found - told:
                with (folder / f"foreign-{os.getpid()}.jsonl").open("a", encoding="utf-8") as file:
                    file.write(
                        json.dumps({"service": service, "blocks": sorted(found - told)}) + "\n"
                    )
            told |= found
            counts.write_text(json.dumps(dice.counts), encoding="utf-8")
            await asyncio.sleep(interval_s)

    async def started(engine: SimEngine) -> None:
        await start(engine)
        tasks.add(asyncio.create_task(watch(engine), name="guard watch"))

    put(SimEngine, "start", started)


def main() -> None:
    service = sys.argv.pop(1)
    faults = WireFaults(**json.loads(os.environ["HEADRACE_CHAOS"]))
    dice = Dice(faults)
    break_part(faults.break_part)
    reports = Path(os.environ["HEADRACE_CHAOS_REPORTS"])
    report_on(reports, service, dice, faults.watch_interval_s)
    if service == "decode":
        put(headrace_decode.main, "HandoffServicer", lossy_handoffs(dice))
        headrace_decode.main.main()
    else:
        slow_down(faults, dice)
        put(headrace_prefill.puller, "PullSession", lossy_pulls(dice))
        headrace_prefill.main.main()


if __name__ == "__main__":
    main()
