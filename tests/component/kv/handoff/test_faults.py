"""Faults of writes, streams, leases and peers. No block is reused while a write may still land in it."""

from __future__ import annotations

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
from headrace_common.limits import write_quiet_s
from headrace_kv.layout import WorkerRef
from headrace_kv.leases import Clock
from headrace_kv.receive.transfer import PrefillPeer, TransferState
from tests.component.kv.harness import (
    BLOCK_TOKENS,
    LEASE_S,
    QUARANTINE_S,
    TRANSFER_S,
    make_layout,
    running,
)
from tests.in_memory_transport import Fault, FaultKind, FaultPlan
from tests.model.virtual_time import VirtualTimers
from tests.sent_layers import sent_layers
from tests.waiting import let_a_wrong_step_show, until

QUIET_S = 1000.0


async def test_a_failed_write_is_reported_at_once_and_released_only_when_quiet() -> None:
    """The transport reports a failure, and the bytes may land for QUIET_S after that."""
    fail = FaultPlan({4: Fault(FaultKind.FAIL)})
    passed_s = 0.0
    clock = Clock(monotonic_s=lambda: time.monotonic() + passed_s)
    async with running(faults=fail, quiet_after_failure_s=QUIET_S, sender_clock=clock) as rig:
        transfer = rig.send()
        with pytest.raises(TransferFailed, match="rank 0 of prefill-0"):
            await transfer.wait()
        await let_a_wrong_step_show()
        assert rig.receiver.quarantined_blocks == 3
        assert not rig.released
        assert rig.is_sending(transfer.transfer_id)
        passed_s = QUIET_S
        await until(lambda: bool(rig.released))
        assert rig.released_ids() == [transfer.transfer_id]
        (report,) = await rig.quiet(transfer.transfer_id)
        assert report.reason == "TRANSFER_FAILED"
        assert len(sent_layers([report])) == 3
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
        await rig.received(transfer)
        assert seen
        (report,) = await rig.quiet(transfer.transfer_id)
        assert not report.reason


async def test_broken_stream_quarantines_the_blocks() -> None:
    hold = Fault(FaultKind.HOLD)
    timers = VirtualTimers()
    async with running(faults=FaultPlan({3: hold}), receiver_timers=timers) as rig:
        transfer = rig.send()
        await until(lambda: transfer.ledger is not None and transfer.ledger.ack_count == 2)
        (peer,) = transfer.writers
        ((sending, *_),) = [sender._loop._peers.values() for sender in rig.senders]
        peer.end(ProtocolViolation("the test cuts the stream"))
        with pytest.raises(TransferFailed, match="stream of rank 0"):
            await transfer.wait()
        await until(sending.stream.ended.done)
        timers.advance_to(timers.time() + 0.99 * write_quiet_s(LEASE_S, QUARANTINE_S))
        assert not rig.released
        hold.release.set()
        timers.advance_to(timers.time() + 0.1 * write_quiet_s(LEASE_S, QUARANTINE_S))
        (report,) = await rig.quiet(transfer.transfer_id)
        # The end of the stream, or the next write, which has no lease.
        assert report.reason in ("PROTOCOL_VIOLATION", "TRANSFER_FAILED")
        assert rig.released_ids() == [transfer.transfer_id]


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
    timers = VirtualTimers()
    async with running(2, 1, receiver_timers=timers) as rig:
        transfer = rig.start()
        rig.push(transfer.transfer_id, layers=range(2))
        await until(lambda: transfer.ledger is not None and transfer.ledger.ack_count == 4)
        timers.advance_to(timers.time() + TRANSFER_S)
        with pytest.raises(
            TransferTimeout, match=r"layers 2-5 from rank 0; layers 2-5 from rank 1$"
        ):
            await transfer.wait()
        await until(lambda: bool(rig.released))
        unopened = rig.reserve()
        timers.advance_to(timers.time() + TRANSFER_S)
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


async def test_a_transfer_without_a_reservation_is_refused_at_once_and_delays_no_other() -> None:
    async with running() as rig:
        fine = rig.reserve()
        unknown = replace(rig.target(fine), transfer_id="x" + "0" * 32)
        rig.open(unknown)
        rig.push(unknown.transfer_id)
        rig.open(rig.target(fine))
        rig.push(fine.transfer_id)
        await rig.received(fine)
        (report,) = await rig.quiet(unknown.transfer_id)
        assert report.reason == "NOT_FOUND"
