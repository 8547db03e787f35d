"""Several writes in flight between both ends. tests/unit/kv/send/test_sender.py has their order, failures and times."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future

from headrace_common.errors import Cancelled
from headrace_kv.copy_plan import Runs
from headrace_kv.transport.base import KvTransport, WriteResult
from tests.component.kv.harness import running
from tests.in_memory_transport import InMemoryTransport, MemoryFabric
from tests.sent_layers import sent_layers
from tests.waiting import let_a_wrong_step_show, until


class SlowTransport(InMemoryTransport):
    """A transport with writes that the test ends."""

    pending_limit = 3

    def __init__(self, fabric: MemoryFabric) -> None:
        super().__init__(fabric=fabric)
        self.in_flight: deque[tuple[str, Runs, Future[WriteResult]]] = deque()

    def submit(self, session: str, runs: Runs, timeout_s: float) -> Future[WriteResult]:
        future: Future[WriteResult] = Future()
        self.in_flight.append((session, runs, future))
        return future

    def land(self) -> None:
        """The first of the writes in flight lands."""
        session, runs, future = self.in_flight.popleft()
        future.set_result(self.write(session, runs, 1.0))


async def test_cancelled_blocks_stay_held_while_writes_are_in_flight() -> None:
    """I1 and I2: neither side may reuse a block that a pending write reads or fills."""
    fabric = MemoryFabric()
    slow = SlowTransport(fabric)

    def transports(role: str, rank: int) -> KvTransport:
        return slow if role == "prefill" else InMemoryTransport(fabric=fabric)

    async with running(1, 1, transports) as rig:
        transfer = rig.send()
        await until(lambda: len(slow.in_flight) == slow.pending_limit)
        rig.receiver.cancel(transfer.transfer_id, Cancelled.reason, "the client left")
        (sender,) = rig.senders
        await until(
            lambda: sender._loop.transfers.find_running(transfer.transfer_id) is None,
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
        assert (report.reason, sent_layers([report])) == ("CANCELLED", [])
        assert not rig.is_sending(transfer.transfer_id)
