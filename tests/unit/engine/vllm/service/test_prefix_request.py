"""The sending of a decode request's cached KV: its ends, and when its blocks may be reused. Without vLLM."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from headrace_common.errors import InternalError, NotFound, TransferTimeout
from headrace_engine.vllm.service import prefill_request
from headrace_engine.vllm.service.prefill_request import PrefixRequest
from headrace_kv.handoff.messages import SendReport, TransferTarget
from headrace_kv.layout.layout import WorkerRef
from tests.waiting import until

LONG_S = 30.0


class RecordingLink:
    """Records what is sent to the engine's processes."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def send_prefix(self, target: TransferTarget) -> None:
        self.events.append("send")

    def stop(self, transfer_id: str) -> None:
        self.events.append("stop")

    def prefix_sent(self, transfer_id: str) -> None:
        self.events.append("sent")


class Rig:
    """A request on an engine with two ranks."""

    def __init__(self, timeout_s: float = LONG_S) -> None:
        link: Any = RecordingLink()
        self.events: list[str] = link.events
        target = TransferTarget(
            transfer_id="x1",
            decode=WorkerRef("p0", "1"),
            handoff_endpoint="127.0.0.1:9",
            start_token=0,
            end_token=64,
            deadline_s=time.monotonic() + timeout_s,
        )
        self.request = PrefixRequest(link, target, 2, lambda: self.events.append("quiet"))
        self.running = asyncio.create_task(self.request.run())

    async def started(self) -> None:
        await until(lambda: "send" in self.events)

    def report(self, rank: int, reason: str = "") -> None:
        self.request.transfer_quiet(SendReport("x1", rank, reason, "why"))


async def test_a_prefix_is_sent_when_every_rank_is_quiet() -> None:
    rig = Rig()
    await rig.started()
    rig.report(1)
    assert rig.events == ["send"]
    rig.report(0)
    assert rig.events == ["send", "sent", "quiet"]
    assert [report.rank for report in await rig.running] == [0, 1]


async def test_a_failed_rank_stops_the_others_and_the_blocks_stay_until_they_are_quiet() -> None:
    rig = Rig()
    await rig.started()
    rig.report(0, NotFound.reason)
    assert rig.events == ["send", "stop"]
    rig.report(1, "CANCELLED")
    assert rig.events == ["send", "stop", "sent", "quiet"]
    # The first failure counts.
    with pytest.raises(NotFound, match="rank 0: why"):
        await rig.running


@pytest.mark.parametrize("cancelled", [True, False])
async def test_a_prefix_that_ends_early_waits_for_the_ranks(cancelled: bool) -> None:
    rig = Rig(timeout_s=LONG_S if cancelled else 0.05)
    await rig.started()
    if cancelled:
        rig.running.cancel()
    await until(lambda: "stop" in rig.events)
    assert not rig.running.done()
    for rank in range(2):
        rig.report(rank, "CANCELLED")
    with pytest.raises(asyncio.CancelledError if cancelled else TransferTimeout):
        await rig.running
    assert rig.events == ["send", "stop", "sent", "quiet"]


async def test_blocks_of_a_rank_that_is_not_quiet_in_time_stay_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefill_request, "QUIET_TIMEOUT_S", 0.05)
    rig = Rig(timeout_s=0.05)
    rig.request.transfer_quiet(SendReport("x1", 0, "", ""))
    with pytest.raises(TransferTimeout):
        await rig.running
    assert rig.events == ["send", "stop"]
    rig.report(1, "CANCELLED")
    assert rig.events == ["send", "stop", "sent", "quiet"]


async def test_a_lost_engine_ends_it() -> None:
    rig = Rig()
    await rig.started()
    rig.request.engine_lost(InternalError("vLLM has ended"))
    with pytest.raises(InternalError, match="vLLM has ended"):
        await rig.running
    assert rig.events == ["send", "quiet"]
