"""An abort frees prefill's blocks within a second, at any stage and from either side (I2)."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import product

import pytest

from headrace_kv.receive.transfer import PrefillPeer, TransferState
from tests.component.kv.harness import (
    LAYERS,
    LentMooncake,
    Rig,
    TransportSource,
    memory_transports,
    running,
)
from tests.in_memory_transport import Fault, FaultKind, FaultPlan
from tests.waiting import until

FREE_WITHIN_S = 1.0
ATTEMPTS = 5
STAGES = ("connecting", "open", "sending", "last layer", "committed")


@asynccontextmanager
async def rig_at(stage: str, transports: TransportSource) -> AsyncIterator[tuple[Rig, str]]:
    """A transfer of two prefill ranks that has reached `stage`, and its id."""
    async with running(2, 1, transports) as rig:
        if stage == "without an answer":
            opens: list[PrefillPeer] = []
            rig.receiver.handle = lambda peer, request: opens.append(peer)  # type: ignore[method-assign]
            name = rig.start().transfer_id
            await until(lambda: len(opens) == len(rig.senders))
            yield rig, name
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


@pytest.mark.parametrize(
    "stage, abort",
    [*product(STAGES, (by_decode, by_prefill)), ("without an answer", by_prefill)],
)
@pytest.mark.parametrize("over", ["slow memory", "mooncake"])
async def test_an_abort_at_any_stage_frees_prefill_within_a_second(
    over: str, stage: str, abort: Callable[[Rig, str], None], mooncake: LentMooncake
) -> None:
    slow = memory_transports(FaultPlan(every=Fault(FaultKind.DELAY, seconds=0.15)))
    transports = mooncake if over == "mooncake" else slow
    took_s: list[float] = []
    # A real clock, because Mooncake has no other. A machine that stands still delays one attempt, not each.
    for _ in range(ATTEMPTS):
        took_s.append(await freed_after_s(stage, abort, transports))
        if took_s[-1] < FREE_WITHIN_S:
            return
    raise AssertionError(f"prefill is freed after {took_s} s")


async def freed_after_s(
    stage: str, abort: Callable[[Rig, str], None], transports: TransportSource
) -> float:
    """Seconds from the abort of a transfer at `stage` until nothing of it is held."""
    async with rig_at(stage, transports) as (rig, transfer_id):
        start_s = time.monotonic()
        abort(rig, transfer_id)
        await rig.quiet(transfer_id)
        assert not rig.is_sending(transfer_id)
        if abort is by_decode:
            await until(lambda: not rig.receiver.active_count)
            await until(lambda: not rig.receiver.quarantined_blocks)
        seconds = time.monotonic() - start_s
        reasons = {report.reason for report in rig.reports}
        assert reasons == {"CANCELLED"} or stage in ("last layer", "committed")
        assert len(rig.reports) == 2
        return seconds
