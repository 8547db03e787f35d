"""An abort frees prefill's blocks within a second, at any stage and from either side (I2)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from headrace_common.identity import new_transfer_id
from headrace_kv.receive.receiver import ReceiverLimits
from headrace_kv.receive.state import TransferState
from headrace_kv.transport.in_memory import Fault, FaultKind, FaultPlan
from tests.component.kv.harness import (
    LAYERS,
    LentMooncake,
    Rig,
    TransportSource,
    memory_transports,
    running,
)
from tests.waiting import until

FREE_WITHIN_S = 1.0
STAGES = ("connecting", "without a reservation", "open", "sending", "last layer", "committed")


@asynccontextmanager
async def rig_at(stage: str, transports: TransportSource) -> AsyncIterator[tuple[Rig, str]]:
    """A transfer of two prefill ranks that has reached `stage`, and its id."""
    limits = ReceiverLimits(open_wait_s=30.0)
    async with running(2, 1, transports, receiver_limits=limits) as rig:
        if stage == "without a reservation":
            target = replace(rig.target(rig.reserve()), transfer_id=new_transfer_id())
            rig.open(target)
            await asyncio.sleep(0.2)
            yield rig, target.transfer_id
            return
        transfer = rig.start()
        name = transfer.transfer_id
        if stage != "connecting":
            await until(lambda: len(transfer.writers) == 2)
        if stage == "sending":
            rig.push(name, layers=range(3))
            await until(lambda: transfer.state is TransferState.RECEIVING)
        elif stage == "last layer":
            rig.push(name, layers=range(LAYERS - 1))
            await until(lambda: "layer 5" in transfer.missing())
            rig.push(name, layers=range(LAYERS - 1, LAYERS))
        elif stage == "committed":
            rig.push(name)
            await transfer.wait()
        yield rig, name


def by_decode(rig: Rig, transfer_id: str) -> None:
    rig.receiver.cancel(transfer_id, "CANCELLED", "the client left")


def by_prefill(rig: Rig, transfer_id: str) -> None:
    for sender in rig.senders:
        sender.stop(transfer_id, "CANCELLED", "the client left")


@pytest.mark.parametrize("abort", [by_decode, by_prefill])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("over", ["slow memory", "mooncake"])
async def test_an_abort_at_any_stage_frees_prefill_within_a_second(
    over: str, stage: str, abort: Callable[[Rig, str], None], mooncake: LentMooncake
) -> None:
    slow = memory_transports(FaultPlan(every=Fault(FaultKind.DELAY, seconds=0.15)))
    transports = mooncake if over == "mooncake" else slow
    async with rig_at(stage, transports) as (rig, transfer_id):
        start = time.monotonic()
        abort(rig, transfer_id)
        await rig.quiet(transfer_id, FREE_WITHIN_S)
        assert not rig.is_sending(transfer_id)
        if stage != "without a reservation" and abort is by_decode:
            await until(lambda: not rig.receiver.active_count, FREE_WITHIN_S)
            await until(lambda: not rig.receiver.quarantined_blocks, FREE_WITHIN_S)
        assert time.monotonic() - start < FREE_WITHIN_S
        reasons = {report.reason for report in rig.reports}
        assert reasons == {"CANCELLED"} or stage in ("last layer", "committed")
        assert len(rig.reports) == 2


async def test_a_write_that_never_ends_is_abandoned_with_the_lease() -> None:
    hold = FaultPlan({2: Fault(FaultKind.HOLD)})
    async with running(faults=hold, lease_ttl_s=0.8, quarantine_s=0.2) as rig:
        transfer = rig.send()
        await until(lambda: transfer.state is TransferState.RECEIVING)
        start = time.monotonic()
        by_decode(rig, transfer.transfer_id)
        await rig.quiet(transfer.transfer_id, 5.0)
        assert time.monotonic() - start < 0.8 + 4
        await until(lambda: bool(rig.released), 2.0)
