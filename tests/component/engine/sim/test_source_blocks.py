"""Prefill's blocks are not freed while a write may still read them (I2)."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from headrace_common.errors import Cancelled
from headrace_kv.copy_plan import Runs
from headrace_kv.receive.transfer import TransferState
from headrace_kv.transport.base import KvTransport, WriteResult
from tests.component.engine.sim.support import close, decode_work, pair
from tests.in_memory_transport import Fault, FaultKind, FaultPlan, InMemoryTransport
from tests.sim_blocks import free_blocks
from tests.waiting import PATIENCE_S, let_a_wrong_step_show, until

PROMPT = list(range(100, 150))


class ThreadedTransport(InMemoryTransport):
    """Two writes at once, each on its own thread."""

    pending_limit = 2

    def __init__(self, faults: FaultPlan) -> None:
        super().__init__(faults)
        self._threads = ThreadPoolExecutor(2)

    def submit(self, session: str, runs: Runs, timeout_s: float) -> Future[WriteResult]:
        return self._threads.submit(self.write, session, runs, timeout_s)

    def close(self) -> None:
        self._threads.shutdown()
        super().close()


@pytest.mark.parametrize("kind", [InMemoryTransport, ThreadedTransport])
@pytest.mark.parametrize("canceller", ["prefill", "decode"])
async def test_held_writes_hold_the_source_blocks(
    kind: type[InMemoryTransport] | type[ThreadedTransport], canceller: str
) -> None:
    """No block is freed before the held write has ended, whichever side cancels."""
    hold = Fault(FaultKind.HOLD)
    held: list[InMemoryTransport] = []

    def transport() -> KvTransport:
        held.append(kind(FaultPlan({2: hold})))
        return held[0]

    async with pair(prefill_transports=transport, model="sim:layers=3,context=512") as both:
        free = free_blocks(both.prefill)
        started = await both.start(decode_work(PROMPT, remote_kv=True))
        prefill, transfer = started.prefill, started.transfer
        await until(lambda: held[0].write_count >= 2)
        held_blocks = free - free_blocks(both.prefill)
        assert held_blocks == 7
        if canceller == "prefill":
            prefill.cancel()
        else:
            both.receiver.cancel("x1", "CANCELLED", "the client left")
        await let_a_wrong_step_show()
        assert not prefill.done()
        assert free - free_blocks(both.prefill) == held_blocks
        assert transfer.state is not TransferState.FREE
        hold.release.set()
        await asyncio.wait({prefill}, timeout=PATIENCE_S)
        assert prefill.done()
        await until(lambda: free_blocks(both.prefill) == free)
        await until(lambda: transfer.state is TransferState.FREE)
        with pytest.raises((asyncio.CancelledError, Cancelled)):
            await prefill
        await close(started.reader)
