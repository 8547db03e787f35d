"""Several writes in flight: order, separate results, and quiet only when the last has ended."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from headrace_common.errors import Cancelled, TransferFailed, TransferTimeout
from headrace_kv.plan.copy_plan import Runs
from headrace_kv.receive.receiver import IncomingTransfer
from headrace_kv.receive.state import TransferState
from headrace_kv.transport.base import KvTransport, WriteResult
from headrace_kv.transport.in_memory import InMemoryTransport, MemoryFabric
from tests.component.kv.harness import BLOCK_TOKENS, BLOCKS, LAYERS, TOKENS, Rig, running
from tests.waiting import until


class SlowTransport(InMemoryTransport):
    """A transport with writes that the test ends, in any order."""

    pending_limit = 3

    def __init__(self, fabric: MemoryFabric) -> None:
        super().__init__(fabric=fabric)
        self.in_flight: deque[tuple[str, Runs, Future[WriteResult]]] = deque()
        self.max_in_flight = 0

    def submit(self, session: str, runs: Runs, timeout_s: float) -> Future[WriteResult]:
        future: Future[WriteResult] = Future()
        self.in_flight.append((session, runs, future))
        self.max_in_flight = max(self.max_in_flight, len(self.in_flight))
        return future

    def land(self, index: int = 0, result: WriteResult | None = None) -> None:
        """The `index`-th of the writes in flight lands."""
        session, runs, future = self.in_flight[index]
        del self.in_flight[index]
        written = self.write(session, runs, 1.0)
        future.set_result(result or written)

    def fail(self, index: int = 0, error: Exception | None = None) -> None:
        """The `index`-th of the writes in flight fails."""
        future = self.in_flight[index][2]
        del self.in_flight[index]
        future.set_exception(error or TransferFailed("the test fails this write"))

    async def land_next(self, count: int = LAYERS, index: int = 0) -> None:
        """The next `count` writes land, always the `index`-th of those in flight."""
        for _ in range(count):
            await until(lambda: bool(self.in_flight))
            self.land(index)


@asynccontextmanager
async def rig_with(
    *, quiet_after_failure_s: float = 0.0, decode_tp: int = 1, **settings: Any
) -> AsyncIterator[tuple[Rig, SlowTransport]]:
    """One prefill rank with a SlowTransport."""
    fabric = MemoryFabric()
    slow = SlowTransport(fabric)
    slow.quiet_after_failure_s = quiet_after_failure_s

    def transports(role: str, rank: int) -> KvTransport:
        return slow if role == "prefill" else InMemoryTransport(fabric=fabric)

    async with running(1, decode_tp, transports, **settings) as rig:
        try:
            yield rig, slow
        finally:
            while slow.in_flight:
                slow.fail()


async def start_transfer(
    rig: Rig, slow: SlowTransport, *, seconds: float = 20.0, writes: int = 3
) -> IncomingTransfer:
    """A transfer of six layers with the first `writes` in flight."""
    transfer = rig.reserve()
    rig.open(rig.target(transfer, timeout_s=seconds))
    before = len(slow.in_flight)
    rig.push(transfer.transfer_id)
    await until(lambda: len(slow.in_flight) == before + writes)
    return transfer


def acks(transfer: IncomingTransfer) -> int:
    return transfer.ledger.ack_count if transfer.ledger is not None else 0


async def test_later_writes_start_before_earlier_ones_have_landed() -> None:
    async with rig_with() as (rig, slow):
        transfer = await start_transfer(rig, slow)
        await asyncio.sleep(0.05)
        assert len(slow.in_flight) == 3
        assert acks(transfer) == 0
        for landed in range(1, 7):
            slow.land()
            await until(lambda n=landed: acks(transfer) == n)  # type: ignore[misc]
            await until(lambda n=landed: len(slow.in_flight) == min(3, 6 - n))  # type: ignore[misc]
        summary = await rig.received(transfer)
        assert summary.acknowledgement_count == LAYERS
        (report,) = await rig.quiet(transfer.transfer_id)
        assert slow.max_in_flight == 3
        assert [sent.layer for sent in report.layers] == list(range(LAYERS))
        (link,) = report.links
        assert (link.transport, link.strategy) == ("in_memory", "direct")
        assert link.entry_count == link.run_count


async def test_writes_that_land_out_of_order_are_acknowledged_in_order() -> None:
    """The later chunks of a layer land first. Decode must not see a gap."""
    async with rig_with() as (rig, slow):
        transfer = rig.start()
        for start in range(0, TOKENS, BLOCK_TOKENS):
            rig.push(transfer.transfer_id, BLOCKS, start, start + BLOCK_TOKENS, range(1))
        await until(lambda: len(slow.in_flight) == 3)
        slow.land(2)
        slow.land(1)
        await asyncio.sleep(0.05)
        assert acks(transfer) == 0
        slow.land(0)
        await until(lambda: acks(transfer) == 3)
        rig.push(transfer.transfer_id, layers=range(1, LAYERS))
        await slow.land_next(LAYERS - 1, index=-1)
        await rig.received(transfer)


async def test_a_write_in_several_batches_has_landed_with_its_last() -> None:
    async with rig_with() as (rig, slow):
        slow.entry_limit = 4
        transfer = rig.start()
        rig.push(transfer.transfer_id, layers=range(1))
        # Decode's block ids descend, so that the 3 blocks in 2 parts do not merge.
        await until(lambda: len(slow.in_flight) == 2)
        slow.land(1, WriteResult("mooncake/tcp", "gather_scatter", 1))
        await asyncio.sleep(0.05)
        assert acks(transfer) == 0
        slow.land(0)
        await until(lambda: acks(transfer) == 1)
        rig.push(transfer.transfer_id, layers=range(1, LAYERS))
        await slow.land_next(2 * (LAYERS - 1))
        await rig.received(transfer)
        (report,) = await rig.quiet(transfer.transfer_id)
        (link,) = report.links
        assert (link.transport, link.strategy) == (
            "mooncake/tcp+in_memory",
            "gather_scatter+direct",
        )
        assert (link.run_count, link.entry_count) == (6 * LAYERS, 1 + 4 + 6 * (LAYERS - 1))


async def test_each_decode_rank_has_its_own_window() -> None:
    async with rig_with(decode_tp=2) as (rig, slow):
        transfer = await start_transfer(rig, slow, writes=6)
        assert sorted(session for session, _, _ in slow.in_flight) == sorted(
            [arena.memory.session for arena in rig.destinations] * 3
        )
        await slow.land_next(2 * LAYERS, index=-1)
        await rig.received(transfer)


async def test_a_failed_write_fails_its_transfer_and_not_its_neighbour() -> None:
    async with rig_with(quiet_after_failure_s=0.3) as (rig, slow):
        doomed, fine = rig.start(), rig.start(first_block=20)
        await until(lambda: doomed.state is fine.state is TransferState.OPEN)
        rig.push(doomed.transfer_id, layers=range(2))
        await until(lambda: len(slow.in_flight) == 2)
        rig.push(fine.transfer_id)
        await until(lambda: len(slow.in_flight) == 3)
        slow.fail(0)
        with pytest.raises(TransferFailed, match="the test fails this write"):
            await doomed.wait()
        await asyncio.sleep(0.4)
        # The other write can still land, so the blocks on both sides stay held.
        assert not rig.released
        assert rig.is_sending(doomed.transfer_id)
        slow.land(0)
        await until(lambda: rig.released_ids() == [doomed.transfer_id])
        assert not rig.is_sending(doomed.transfer_id)
        await slow.land_next()
        await rig.received(fine)


async def test_the_quiet_time_counts_from_the_last_failure() -> None:
    async with rig_with(quiet_after_failure_s=0.3) as (rig, slow):
        transfer = await start_transfer(rig, slow)
        slow.fail()
        with pytest.raises(TransferFailed):
            await transfer.wait()
        await asyncio.sleep(0.4)
        slow.land()
        last = time.monotonic()
        slow.fail()
        await until(lambda: bool(rig.released))
        assert rig.released[0][1] - last >= 0.3


async def test_cancelled_blocks_stay_held_while_writes_are_in_flight() -> None:
    """I1 and I2: neither side may reuse a block that a pending write reads or fills."""
    async with rig_with() as (rig, slow):
        transfer = await start_transfer(rig, slow)
        rig.receiver.cancel(transfer.transfer_id, Cancelled.reason, "the client left")
        await asyncio.sleep(0.2)
        assert len(slow.in_flight) == 3
        for _ in range(3):
            assert not rig.released
            assert rig.receiver.quarantined_blocks == 3
            assert rig.is_sending(transfer.transfer_id)
            assert not rig.reports
            slow.land()
            await asyncio.sleep(0.02)
        await until(lambda: rig.released_ids() == [transfer.transfer_id])
        (report,) = await rig.quiet(transfer.transfer_id)
        assert (report.reason, report.layers) == ("CANCELLED", ())
        assert not rig.is_sending(transfer.transfer_id)


async def test_a_deadline_names_the_layers_that_have_not_landed() -> None:
    async with rig_with() as (rig, slow):
        transfer = await start_transfer(rig, slow, seconds=0.4)
        slow.land()
        await until(lambda: acks(transfer) == 1 and len(slow.in_flight) == 3)
        with pytest.raises(TransferTimeout, match=r"layers 1, 2, 3, 4, 5 \(5 of 6\)"):
            await transfer.wait()
        await asyncio.sleep(0.1)
        assert not rig.released
        assert not rig.reports
        for _ in range(3):
            slow.land()
        await until(lambda: bool(rig.released))
        (report,) = await rig.quiet(transfer.transfer_id)
        assert report.reason == "TRANSFER_TIMEOUT"


async def test_no_write_starts_without_a_lease_and_quiet_waits_for_the_others() -> None:
    async with rig_with(lease_ttl_s=0.3, quarantine_s=0.1) as (rig, slow):
        transfer = await start_transfer(rig, slow)
        # Both ends share an event loop, so this stops decode's renewals and the sender's reading.
        time.sleep(0.5)  # noqa: ASYNC251
        slow.land()
        time.sleep(0.1)  # noqa: ASYNC251
        assert len(slow.in_flight) == 2
        assert not rig.reports
        await asyncio.sleep(0.1)
        assert rig.is_sending(transfer.transfer_id)
        slow.land()
        slow.land()
        (report,) = await rig.quiet(transfer.transfer_id)
        assert report.reason == "TRANSFER_FAILED"
        assert "lease" in report.detail
        assert len(slow.in_flight) == 0


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_transports_bug_fails_one_transfer(
    cancelled: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with rig_with() as (rig, slow):
        transfer = await start_transfer(rig, slow)
        if cancelled:
            slow.in_flight.popleft()[2].cancel()
        else:
            slow.fail(0, ZeroDivisionError("a bug"))
        slow.land()
        slow.land()
        with pytest.raises(TransferFailed, match="met a bug"):
            await transfer.wait()
        assert "met a bug" in caplog.text
        fine = await start_transfer(rig, slow)
        await slow.land_next()
        await rig.received(fine)


async def test_closing_waits_for_writes_until_they_are_overdue(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with rig_with(lease_ttl_s=0.5) as (rig, slow):
        transfer = await start_transfer(rig, slow)
        (sender,) = rig.senders
        sender.close()
        await asyncio.sleep(0.3)
        assert not sender.closed.done()
        start = time.monotonic()
        await asyncio.wait_for(asyncio.wrap_future(sender.closed), 8.0)
        assert time.monotonic() - start < 5.0
        # These writes may never be reported as ended.
        assert not rig.reports
        assert rig.is_sending(transfer.transfer_id)
        assert "did not end its writes in time" in caplog.text
        assert not np.any(rig.destinations[0].cells)


async def test_closing_reports_once_the_writes_have_ended() -> None:
    async with rig_with() as (rig, slow):
        transfer = await start_transfer(rig, slow)
        (sender,) = rig.senders
        sender.close()
        await asyncio.sleep(0.1)
        assert not rig.reports
        for _ in range(3):
            slow.land()
        await asyncio.wait_for(asyncio.wrap_future(sender.closed), 5.0)
        (report,) = rig.reports
        assert (report.transfer_id, report.reason) == (transfer.transfer_id, "DRAINING")
