"""Faults of writes, streams, leases and peers. No block is reused while a write may still land in it."""

from __future__ import annotations

import asyncio
import socket
import time
from dataclasses import replace
from typing import Any

import pytest

from headrace.kv.v1 import handoff_pb2
from headrace_common.errors import (
    Cancelled,
    DuplicateTransfer,
    ProtocolViolation,
    TransferFailed,
    TransferTimeout,
)
from headrace_kv.layout.layout import WorkerRef
from headrace_kv.receive.receiver import ReceiverLimits
from headrace_kv.receive.state import TransferState
from headrace_kv.receive.transfer import PrefillPeer
from headrace_kv.send.sender import SenderLimits
from headrace_kv.transport.in_memory import Fault, FaultKind, FaultPlan, InMemoryTransport
from tests.component.kv.harness import BLOCK_TOKENS, make_layout, running
from tests.waiting import until


async def test_a_failed_write_is_reported_at_once_and_released_only_when_quiet() -> None:
    """The transport reports a failure, and the bytes land 3 s later. The blocks must stay held until then."""
    late = FaultPlan({4: Fault(FaultKind.FAIL_LATE, seconds=3.0)})
    async with running(faults=late, quiet_after_failure_s=3.2) as rig:
        transfer = rig.send()
        start = time.monotonic()
        with pytest.raises(TransferFailed, match="rank 0 of prefill-0"):
            await transfer.wait()
        assert time.monotonic() - start < 2.9
        assert rig.receiver.quarantined_blocks == 3
        assert not rig.released
        assert rig.is_sending(transfer.transfer_id)
        await until(lambda: bool(rig.released))
        assert rig.released_ids() == [transfer.transfer_id]
        sender_transport = rig.transports[0]
        assert isinstance(sender_transport, InMemoryTransport)
        assert (
            0 < sender_transport.last_landing_unix_ns < transfer.entered_unix_ns(TransferState.FREE)
        )
        (report,) = await rig.quiet(transfer.transfer_id)
        assert report.reason == "TRANSFER_FAILED"
        assert len(report.layers) == 3
        assert not rig.is_sending(transfer.transfer_id)
        assert rig.receiver.quarantined_blocks == 0


@pytest.mark.parametrize("kind, copies", [("open", 0), ("open", 2), ("reservation", 0)])
async def test_an_open_may_be_lost_or_repeated_and_a_reservation_lost(
    kind: str, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def delivered(message: Any) -> int:
        """How often a message is delivered."""
        if message.WhichOneof("message") != kind:
            return 1
        seen.append(kind)
        return copies if len(seen) == 1 else 1

    async with running() as rig:
        handle, connect = rig.receiver.handle, rig.receiver.connect

        def handle_copies(peer: PrefillPeer, request: handoff_pb2.HandoffRequest) -> None:
            for _ in range(delivered(request)):
                handle(peer, request)

        def connect_with_copies(hello: Any, send: Any, end: Any) -> PrefillPeer:
            def send_copies(response: handoff_pb2.HandoffResponse) -> None:
                for _ in range(delivered(response)):
                    send(response)

            return connect(hello, send_copies, end)

        monkeypatch.setattr(rig.receiver, "handle", handle_copies)
        monkeypatch.setattr(rig.receiver, "connect", connect_with_copies)
        transfer = rig.send()
        async with asyncio.timeout(10):
            await rig.received(transfer)
        assert seen
        (report,) = await rig.quiet(transfer.transfer_id)
        assert not report.reason


async def test_broken_stream_quarantines_the_blocks() -> None:
    hold = Fault(FaultKind.HOLD)
    async with running(faults=FaultPlan({3: hold}), lease_ttl_s=0.3, quarantine_s=0.4) as rig:
        transfer = rig.send()
        await until(lambda: transfer.ledger is not None and transfer.ledger.ack_count == 2)
        broken = time.monotonic()
        (peer,) = transfer.writers
        peer.end(ProtocolViolation("the test cuts the stream"))
        with pytest.raises(TransferFailed, match="stream of rank 0"):
            await transfer.wait()
        assert time.monotonic() - broken < 5.0
        await asyncio.sleep(0.5)
        assert not rig.released
        hold.release.set()
        await until(lambda: bool(rig.released))
        assert rig.released[0][1] - broken >= 2 * 0.3 + 0.4
        (report,) = await rig.quiet(transfer.transfer_id)
        assert report.reason == "TRANSFER_FAILED"
        assert rig.released_ids() == [transfer.transfer_id]


async def test_a_sender_without_its_stream_writes_nothing() -> None:
    async with running(lease_ttl_s=0.3, quarantine_s=0.1) as rig:
        transfer = rig.start()
        await until(lambda: transfer.state is TransferState.OPEN)
        (peer,) = transfer.writers
        peer.end(ProtocolViolation("the test cuts the stream"))
        await rig.quiet(transfer.transfer_id)
        rig.push(transfer.transfer_id)
        await until(lambda: bool(rig.released))
        await asyncio.sleep(0.1)
        assert not rig.destinations[0].cells.any()


async def test_unopened_transfer_is_released_at_once() -> None:
    async with running() as rig:
        transfer = rig.reserve()
        rig.receiver.cancel(transfer.transfer_id, "CANCELLED", "the client left")
        assert rig.released_ids() == [transfer.transfer_id]
        with pytest.raises(Cancelled, match="the client left"):
            await transfer.wait()
        rig.open(rig.target(transfer))
        (report,) = await rig.quiet(transfer.transfer_id)
        assert report.reason == "CANCELLED"
        assert rig.released_ids() == [transfer.transfer_id]


async def test_the_timeout_error_names_the_missing_keys() -> None:
    async with running(2, 1) as rig:
        transfer = rig.start(timeout_s=2.0)
        rig.push(transfer.transfer_id, layers=range(2))
        with pytest.raises(
            TransferTimeout, match=r"layers 2-5 from rank 0; layers 2-5 from rank 1$"
        ):
            await transfer.wait()
        await until(lambda: bool(rig.released))
        unopened = rig.reserve(timeout_s=0.05)
        with pytest.raises(TransferTimeout, match="no prefill rank opened it"):
            await unopened.wait()


async def test_a_stop_and_a_short_finish_are_reported_to_decode() -> None:
    async with running() as rig:
        stopped, short = rig.start(), rig.start()
        await until(lambda: stopped.state is short.state is TransferState.OPEN)
        rig.senders[0].stop(stopped.transfer_id, "INTERNAL", "the engine died")
        with pytest.raises(TransferFailed, match="the engine died"):
            await stopped.wait()
        rig.push(short.transfer_id, layers=range(5))
        rig.finish(short.transfer_id)
        with pytest.raises(TransferFailed, match="the engine ended without layers 5"):
            await short.wait()
        await until(lambda: len(rig.released) == 2)
        assert len(rig.reports) == 2


async def test_skipped_tokens_fail_only_their_transfer() -> None:
    async with running() as rig:
        wrong, right = rig.start(), rig.start()
        rig.push(wrong.transfer_id, start_token=BLOCK_TOKENS)
        with pytest.raises(TransferFailed, match="skipped tokens"):
            await wrong.wait()
        rig.push(right.transfer_id)
        await right.wait()


async def test_too_many_waiting_ranges_fail_the_transfer() -> None:
    async with running(sender_limits=SenderLimits(waiting_ranges=4)) as rig:
        (report,) = await rig.quiet(rig.send().transfer_id)
        assert report.reason == "QUEUE_FULL"
        again = rig.start()
        await until(lambda: again.state is TransferState.OPEN)
        for layer in range(6):
            rig.push(again.transfer_id, layers=range(layer, layer + 1))
            await until(lambda n=layer: again.ledger.ack_count == n + 1)  # type: ignore[misc, union-attr]
        await again.wait()


async def test_ids_are_used_once() -> None:
    async with running() as rig:
        transfer = rig.reserve()
        with pytest.raises(DuplicateTransfer):
            rig.reserve(transfer_id=transfer.transfer_id)
        rig.open(rig.target(transfer))
        with pytest.raises(DuplicateTransfer):
            rig.open(rig.target(transfer))
        rig.push(transfer.transfer_id)
        await transfer.wait()
        with pytest.raises(DuplicateTransfer):
            rig.reserve(transfer_id=transfer.transfer_id)


async def test_stale_incarnation_is_refused() -> None:
    async with running(claimed_decode=WorkerRef("decode-0", "f" * 16)) as rig:
        transfer = rig.start()
        (report,) = await rig.quiet(transfer.transfer_id)
        assert report.reason == "STALE_INCARNATION"
        assert transfer.state is TransferState.RESERVED


async def test_layout_mismatch_names_the_fields() -> None:
    (group,) = make_layout(1).groups
    parts = tuple(replace(part, dtype="bfloat16") for part in group.parts)
    other = replace(group, head_count=8, block_tokens=8, parts=parts)
    async with running(replace(make_layout(1), groups=(other,))) as rig:
        (report,) = await rig.quiet(rig.start().transfer_id)
        assert report.reason == "LAYOUT_MISMATCH"
        assert "attention.k.dtype (float32 != bfloat16)" in report.detail
        assert "attention.head_count" in report.detail
        assert "block_tokens" not in report.detail


async def test_unreachable_decode_worker_fails_the_transfer() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{unused.getsockname()[1]}"
        async with running() as rig:
            transfer = rig.reserve()
            rig.open(replace(rig.target(transfer), handoff_endpoint=endpoint))
            (report,) = await rig.quiet(transfer.transfer_id)
            assert report.reason == "TRANSFER_FAILED"


async def test_a_transfer_without_its_reservation_delays_no_other_and_is_refused_soon() -> None:
    async with running(receiver_limits=ReceiverLimits(open_wait_s=1.0)) as rig:
        fine = rig.reserve()
        unknown = replace(rig.target(fine), transfer_id="x" + "0" * 32)
        rig.open(unknown)
        rig.push(unknown.transfer_id)
        rig.open(rig.target(fine))
        rig.push(fine.transfer_id)
        await rig.received(fine)
        assert rig.is_sending(unknown.transfer_id)
        (report,) = await rig.quiet(unknown.transfer_id)
        assert report.reason == "NOT_FOUND"


async def test_drain_waits_then_ends_everything() -> None:
    async with running() as rig:
        whole, stuck = rig.start(), rig.start()
        drain = asyncio.create_task(rig.receiver.drain(2.0))
        await asyncio.sleep(0.05)
        rig.push(whole.transfer_id)
        await whole.wait()
        await drain
        with pytest.raises(TransferFailed, match="shutting down"):
            await stuck.wait()
        assert rig.receiver.active_count == 0
        await rig.quiet(stuck.transfer_id)
