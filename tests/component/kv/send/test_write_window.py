"""Several writes in flight between both ends. tests/unit/kv/send/test_loop.py has their order, failures and times."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager

from headrace_common.errors import Cancelled, TransferFailed
from headrace_kv.plan.copy_plan import Runs
from headrace_kv.receive.receiver import IncomingTransfer
from headrace_kv.transport.base import KvTransport, WriteResult
from tests.component.kv.harness import Rig, running
from tests.in_memory_transport import InMemoryTransport, MemoryFabric
from tests.waiting import let_a_wrong_step_show, until


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

    def land(self, index: int = 0) -> None:
        """The `index`-th of the writes in flight lands."""
        session, runs, future = self.in_flight[index]
        del self.in_flight[index]
        future.set_result(self.write(session, runs, 1.0))

    def fail(self, index: int = 0, error: Exception | None = None) -> None:
        """The `index`-th of the writes in flight fails."""
        future = self.in_flight[index][2]
        del self.in_flight[index]
        future.set_exception(error or TransferFailed("the test fails this write"))


@asynccontextmanager
async def rig_with(decode_tp: int = 1) -> AsyncIterator[tuple[Rig, SlowTransport]]:
    """One prefill rank with a SlowTransport."""
    fabric = MemoryFabric()
    slow = SlowTransport(fabric)

    def transports(role: str, rank: int) -> KvTransport:
        return slow if role == "prefill" else InMemoryTransport(fabric=fabric)

    async with running(1, decode_tp, transports) as rig:
        try:
            yield rig, slow
        finally:
            while slow.in_flight:
                slow.fail()


async def start_transfer(rig: Rig, slow: SlowTransport, writes: int = 3) -> IncomingTransfer:
    """A transfer of six layers with the first `writes` in flight."""
    transfer = rig.start()
    before = len(slow.in_flight)
    rig.push(transfer.transfer_id)
    await until(lambda: len(slow.in_flight) == before + writes)
    return transfer


async def test_cancelled_blocks_stay_held_while_writes_are_in_flight() -> None:
    """I1 and I2: neither side may reuse a block that a pending write reads or fills."""
    async with rig_with() as (rig, slow):
        transfer = await start_transfer(rig, slow)
        rig.receiver.cancel(transfer.transfer_id, Cancelled.reason, "the client left")
        (sender,) = rig.senders
        await until(
            lambda: sender._loop._table.find_running(transfer.transfer_id) is None,
            what="the cancellation at the sender",
        )
        for _ in range(3):
            assert not rig.released
            assert rig.receiver.quarantined_blocks == 3
            assert rig.is_sending(transfer.transfer_id)
            assert not rig.reports
            slow.land()
            await let_a_wrong_step_show()
        await until(lambda: rig.released_ids() == [transfer.transfer_id])
        (report,) = await rig.quiet(transfer.transfer_id)
        assert (report.reason, report.layers) == ("CANCELLED", ())
        assert not rig.is_sending(transfer.transfer_id)
