"""Which write starts next, and how many may be in flight."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Future

from headrace_common.errors import TransferFailed
from headrace_kv.send.transfer import OutgoingTransfer
from headrace_kv.send.write_scheduler import RoundRobinQueue, WriteWindow
from headrace_kv.transport.base import WriteResult
from tests.in_memory_transport import InMemoryTransport
from tests.unit.kv.send.support import make_range, make_transfer, make_write


def add_writes(queue: RoundRobinQueue, transfer: OutgoingTransfer, count: int) -> None:
    """Adds writes of 100 bytes each to the session that has the transfer's name."""
    queue.add_transfer(transfer)
    for _ in range(count):
        queue.add_write(transfer, make_write(transfer.transfer_id))


def start_next(queue: RoundRobinQueue) -> str:
    """Starts the next batch; returns the name of its transfer."""
    step = queue.next_step()
    assert step is not None
    transfer, write = step
    assert write is not None
    write.start_batch()
    return transfer.transfer_id


async def test_a_full_window_delays_no_other_worker() -> None:
    full = {"slow"}
    queue = RoundRobinQueue(lambda session, nbytes: nbytes == 100 and session not in full)
    for name in ("slow", "a", "b"):
        add_writes(queue, make_transfer(name), 3)
    order = [start_next(queue) for _ in range(6)]
    assert Counter(order) == {"a": 3, "b": 3}
    assert order[:4] in (["a", "b", "a", "b"], ["b", "a", "b", "a"])
    assert queue.next_step() is None
    assert queue.idle
    full.clear()
    assert [start_next(queue) for _ in range(3)] == ["slow"] * 3
    assert queue.next_step() is None
    assert queue.idle


async def test_a_transfer_waits_once_and_its_range_is_planned_before_the_next() -> None:
    queue = RoundRobinQueue(lambda session, nbytes: True)
    transfer = make_transfer("a")
    transfer.range_pushed(make_range("a"))
    for _ in range(2):
        queue.add_transfer(transfer)
    assert queue.next_step() == (transfer, None)
    assert queue.next_step() is None


async def test_room_is_released_after_each_write() -> None:
    transport = InMemoryTransport()
    transport.pending_limit, transport.byte_limit = 3, 250
    window = WriteWindow(transport)
    transfer = make_transfer("unknown")
    started: list[Future[WriteResult]] = []
    for _ in range(2):
        assert window.has_room("unknown", 100)
        future = window.start(transfer, make_write("unknown"), 1000.0, 5.0)
        # No transport has such a session.
        assert isinstance(future.exception(), TransferFailed)
        started.append(future)
    assert not window.has_room("unknown", 100)
    assert window.has_room("unknown", 50)
    assert window.has_room("elsewhere", 10_000)
    assert window.overdue(1005.2, 0.1)
    assert not window.overdue(1005.2, 0.3)
    window.end(started[0])
    assert window.has_room("unknown", 100)
    assert transfer.quiet_at_s() is None
    window.end(started[1])
    assert not window.overdue(1e12, 0.0)
    assert transfer.quiet_at_s() == 0.0
