"""What goes wrong, and that no block is reused while anything may write into it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from headrace.kv.v1 import handoff_pb2, handoff_pb2_grpc
from headrace_common.errors import (
    Cancelled,
    DuplicateTransfer,
    LayoutMismatch,
    ProtocolViolation,
    StaleIncarnation,
    TransferFailed,
    TransferTimeout,
)
from headrace_common.rpc.channel import open_channel
from headrace_common.rpc.status import error_from_rpc
from headrace_kv.layout.layout import WorkerRef
from headrace_kv.layout.proto import layout_to_proto
from headrace_kv.plan.copy_plan import Runs
from headrace_kv.receive.receiver import ReceiverLimits
from headrace_kv.receive.state import TransferState
from headrace_kv.receive.transfer import PrefillPeer
from headrace_kv.send.sender import SenderLimits
from headrace_kv.transport.factory import open_transport
from headrace_kv.transport.in_memory import Fault, FaultKind, FaultPlan, InMemoryTransport
from tests.component.kv.harness import (
    BLOCK_TOKENS,
    Rig,
    make_layout,
    memory_transports,
    running,
    until,
)

BLOCKS = (1, 2, 3)
TOKENS = 3 * BLOCK_TOKENS


async def test_failed_write_is_told_at_once_and_released_only_when_quiet() -> None:
    """The transport says "failed", yet its bytes land 3 s later: the blocks must stay held that long."""
    late = FaultPlan({4: Fault(FaultKind.FAIL_LATE, seconds=3.0)})
    transports = memory_transports(late, quiet_after_failure_s=3.2)
    async with running(make_layout(1), make_layout(1), transports) as rig:
        rig.fill(BLOCKS, seed=1)
        transfer = rig.reserve(TOKENS)
        rig.open(rig.target(transfer))
        rig.push(transfer.transfer_id, BLOCKS, 0, TOKENS)
        start = time.monotonic()
        with pytest.raises(TransferFailed, match="rank 0 of prefill-0"):
            await transfer.wait()
        assert time.monotonic() - start < 2.9
        assert rig.receiver.quarantined_blocks == 3
        assert not rig.released
        assert rig.senders[0].is_active(transfer.transfer_id)
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
        assert not rig.senders[0].is_active(transfer.transfer_id)
        assert rig.receiver.quarantined_blocks == 0


@pytest.mark.parametrize("lost", ["open", "reservation"])
async def test_a_lost_open_or_its_lost_answer_is_asked_for_again(
    lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost_count = 0

    def gets_through(kind: str | None) -> bool:
        nonlocal lost_count
        if kind != lost or lost_count:
            return True
        lost_count += 1
        return False

    async with running(make_layout(1), make_layout(1), memory_transports()) as rig:
        handle, connect = rig.receiver.handle, rig.receiver.connect

        def handle_some(peer: PrefillPeer, request: handoff_pb2.HandoffRequest) -> None:
            if gets_through(request.WhichOneof("message")):
                handle(peer, request)

        def connect_badly(hello: Any, send: Callable[[Any], None], end: Any) -> PrefillPeer:
            def send_some(response: handoff_pb2.HandoffResponse) -> None:
                if gets_through(response.WhichOneof("message")):
                    send(response)

            return connect(hello, send_some, end)

        monkeypatch.setattr(rig.receiver, "handle", handle_some)
        monkeypatch.setattr(rig.receiver, "connect", connect_badly)
        truth = rig.fill(BLOCKS, seed=1)
        transfer = rig.reserve(TOKENS)
        rig.open(rig.target(transfer))
        rig.push(transfer.transfer_id, BLOCKS, 0, TOKENS)
        async with asyncio.timeout(10):
            await transfer.wait()
        assert lost_count == 1
        rig.check_bytes(truth, transfer.reservation)


async def test_an_open_that_comes_twice_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(make_layout(1), make_layout(1), memory_transports()) as rig:
        handle = rig.receiver.handle

        def handle_twice(peer: PrefillPeer, request: handoff_pb2.HandoffRequest) -> None:
            for _ in range(2 if request.WhichOneof("message") == "open" else 1):
                handle(peer, request)

        monkeypatch.setattr(rig.receiver, "handle", handle_twice)
        truth = rig.fill(BLOCKS, seed=1)
        transfer = rig.reserve(TOKENS)
        rig.open(rig.target(transfer))
        rig.push(transfer.transfer_id, BLOCKS, 0, TOKENS)
        async with asyncio.timeout(10):
            await transfer.wait()
        rig.check_bytes(truth, transfer.reservation)
        (report,) = await rig.quiet(transfer.transfer_id)
        assert not report.reason


@pytest.mark.parametrize("kind", [FaultKind.FAIL, FaultKind.TRUNCATE])
async def test_one_failed_transfer_leaves_the_others(kind: FaultKind) -> None:
    async with running(
        make_layout(1), make_layout(2), memory_transports(FaultPlan({1: Fault(kind)}))
    ) as rig:
        truth = rig.fill(BLOCKS, seed=1)
        doomed, fine = rig.reserve(TOKENS), rig.reserve(TOKENS, first_block=20)
        for transfer in (doomed, fine):
            rig.open(rig.target(transfer))
        rig.push(doomed.transfer_id, BLOCKS, 0, TOKENS)
        with pytest.raises(TransferFailed):
            await doomed.wait()
        rig.push(fine.transfer_id, BLOCKS, 0, TOKENS)
        await fine.wait()
        rig.check_bytes(truth, fine.reservation)
        await until(lambda: rig.released_ids() == [doomed.transfer_id])


async def test_broken_stream_quarantines_the_blocks() -> None:
    hold = Fault(FaultKind.HOLD)
    async with running(
        make_layout(1),
        make_layout(1),
        memory_transports(FaultPlan({3: hold})),
        lease_ttl_s=0.3,
        quarantine_s=0.4,
    ) as rig:
        rig.fill(BLOCKS, seed=1)
        transfer = rig.reserve(TOKENS)
        rig.open(rig.target(transfer))
        rig.push(transfer.transfer_id, BLOCKS, 0, TOKENS)
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


async def test_sender_writes_nothing_once_its_stream_is_gone() -> None:
    async with running(
        make_layout(1), make_layout(1), memory_transports(), lease_ttl_s=0.3, quarantine_s=0.1
    ) as rig:
        rig.fill(BLOCKS, seed=1)
        transfer = rig.reserve(TOKENS)
        rig.open(rig.target(transfer))
        await until(lambda: transfer.state is TransferState.OPEN)
        (peer,) = transfer.writers
        peer.end(ProtocolViolation("the test cuts the stream"))
        await rig.quiet(transfer.transfer_id)
        rig.push(transfer.transfer_id, BLOCKS, 0, TOKENS)
        await until(lambda: bool(rig.released))
        await asyncio.sleep(0.1)
        assert not rig.destinations[0].cells.any()


async def test_lease_that_is_not_renewed_stops_the_sender() -> None:
    """Decode's process stands still: the sender must not go on by itself."""
    async with running(make_layout(1), make_layout(1), memory_transports(), lease_ttl_s=0.3) as rig:
        rig.fill(BLOCKS, seed=1)
        transfer = rig.reserve(TOKENS)
        rig.open(rig.target(transfer))
        await until(lambda: transfer.state is TransferState.OPEN)
        # One loop runs both ends here, so this stops decode's renewals and the sender's reading alike.
        time.sleep(0.5)  # noqa: ASYNC251
        rig.push(transfer.transfer_id, BLOCKS, 0, TOKENS)
        time.sleep(0.1)  # noqa: ASYNC251
        assert not rig.destinations[0].cells.any()
        (report,) = await rig.quiet(transfer.transfer_id)
        assert report.reason == "TRANSFER_FAILED"
        assert "lease" in report.detail


async def test_unopened_transfer_is_released_at_once() -> None:
    async with running(make_layout(1), make_layout(1), memory_transports()) as rig:
        transfer = rig.reserve(TOKENS)
        rig.receiver.cancel(transfer.transfer_id, "CANCELLED", "the client left")
        assert rig.released_ids() == [transfer.transfer_id]
        with pytest.raises(Cancelled, match="the client left"):
            await transfer.wait()
        rig.open(rig.target(transfer))
        (report,) = await rig.quiet(transfer.transfer_id)
        assert report.reason == "CANCELLED"
        assert rig.released_ids() == [transfer.transfer_id]


async def test_timeout_names_what_is_missing() -> None:
    async with running(make_layout(2), make_layout(1), memory_transports()) as rig:
        rig.fill(BLOCKS, seed=1)
        transfer = rig.reserve(TOKENS, timeout_s=2.0)
        rig.open(rig.target(transfer))
        rig.push(transfer.transfer_id, BLOCKS, 0, TOKENS, range(2))
        with pytest.raises(
            TransferTimeout, match=r"layers 2-5 from rank 0; layers 2-5 from rank 1$"
        ):
            await transfer.wait()
        await until(lambda: bool(rig.released))
        unopened = rig.reserve(TOKENS, timeout_s=0.05)
        with pytest.raises(TransferTimeout, match="no prefill rank opened it"):
            await unopened.wait()


async def test_senders_deadline_ends_the_transfer() -> None:
    async with running(make_layout(1), make_layout(1), memory_transports()) as rig:
        rig.fill(BLOCKS, seed=1)
        transfer = rig.reserve(TOKENS)
        rig.open(rig.target(transfer, timeout_s=1.5))
        rig.push(transfer.transfer_id, BLOCKS, 0, TOKENS, range(5))
        with pytest.raises(TransferTimeout, match=r"layers 5 \(1 of 6\)"):
            await transfer.wait()
        (report,) = await rig.quiet(transfer.transfer_id)
        assert report.reason == "TRANSFER_TIMEOUT"
        await until(lambda: bool(rig.released))


async def test_cancel_from_decode_stops_every_rank() -> None:
    async with running(make_layout(2), make_layout(2), memory_transports()) as rig:
        rig.fill(BLOCKS, seed=1)
        transfer = rig.reserve(TOKENS)
        rig.open(rig.target(transfer))
        rig.push(transfer.transfer_id, BLOCKS, 0, TOKENS, range(3))
        await until(lambda: transfer.state is TransferState.RECEIVING)
        start = time.monotonic()
        rig.receiver.cancel(transfer.transfer_id, "CANCELLED", "the client left")
        assert not rig.released
        await until(lambda: bool(rig.released))
        assert time.monotonic() - start < 5.0
        before = [arena.cells.copy() for arena in rig.destinations]
        rig.push(transfer.transfer_id, BLOCKS, 0, TOKENS, range(3, 6))
        reports = await rig.quiet(transfer.transfer_id)
        assert {report.reason for report in reports} == {"CANCELLED"}
        assert all(
            np.array_equal(old, arena.cells)
            for old, arena in zip(before, rig.destinations, strict=True)
        )


async def test_stop_and_a_short_finish_are_told_to_decode() -> None:
    async with running(make_layout(1), make_layout(1), memory_transports()) as rig:
        rig.fill(BLOCKS, seed=1)
        stopped, short = rig.reserve(TOKENS), rig.reserve(TOKENS)
        for transfer in (stopped, short):
            rig.open(rig.target(transfer))
            await until(lambda t=transfer: t.state is TransferState.OPEN)  # type: ignore[misc]
        rig.senders[0].stop(stopped.transfer_id, "INTERNAL", "the engine died")
        with pytest.raises(TransferFailed, match="the engine died"):
            await stopped.wait()
        rig.push(short.transfer_id, BLOCKS, 0, TOKENS, range(5))
        rig.finish(short.transfer_id)
        with pytest.raises(TransferFailed, match="the engine ended without layers 5"):
            await short.wait()
        await until(lambda: len(rig.released) == 2)
        assert len(rig.reports) == 2


async def test_skipped_tokens_fail_only_their_transfer() -> None:
    async with running(make_layout(1), make_layout(1), memory_transports()) as rig:
        rig.fill(BLOCKS, seed=1)
        wrong, right = rig.reserve(TOKENS), rig.reserve(TOKENS)
        for transfer in (wrong, right):
            rig.open(rig.target(transfer))
        rig.push(wrong.transfer_id, BLOCKS, BLOCK_TOKENS, TOKENS)
        with pytest.raises(TransferFailed, match="skipped tokens"):
            await wrong.wait()
        rig.push(right.transfer_id, BLOCKS, 0, TOKENS)
        await right.wait()


async def test_too_many_waiting_pieces_fail_the_transfer() -> None:
    async with running(
        make_layout(1),
        make_layout(1),
        memory_transports(),
        sender_limits=SenderLimits(waiting_ranges=4),
    ) as rig:
        rig.fill(BLOCKS, seed=1)
        transfer = rig.reserve(TOKENS)
        rig.open(rig.target(transfer))
        rig.push(transfer.transfer_id, BLOCKS, 0, TOKENS)
        (report,) = await rig.quiet(transfer.transfer_id)
        assert report.reason == "QUEUE_FULL"
        again = rig.reserve(TOKENS)
        rig.open(rig.target(again))
        await until(lambda: again.state is TransferState.OPEN)
        for layer in range(6):
            rig.push(again.transfer_id, BLOCKS, 0, TOKENS, range(layer, layer + 1))
            await until(lambda n=layer: again.ledger.ack_count == n + 1)  # type: ignore[misc, union-attr]
        await again.wait()


async def test_ids_are_used_once() -> None:
    async with running(make_layout(1), make_layout(1), memory_transports()) as rig:
        rig.fill(BLOCKS, seed=1)
        transfer = rig.reserve(TOKENS)
        with pytest.raises(DuplicateTransfer):
            rig.reserve(TOKENS, transfer_id=transfer.transfer_id)
        rig.open(rig.target(transfer))
        with pytest.raises(DuplicateTransfer):
            rig.open(rig.target(transfer))
        rig.push(transfer.transfer_id, BLOCKS, 0, TOKENS)
        await transfer.wait()
        with pytest.raises(DuplicateTransfer):
            rig.reserve(TOKENS, transfer_id=transfer.transfer_id)


async def test_stale_incarnation_is_refused() -> None:
    former = WorkerRef("decode-0", "f" * 16)
    async with running(
        make_layout(1), make_layout(1), memory_transports(), claimed_decode=former
    ) as rig:
        transfer = rig.reserve(TOKENS)
        rig.open(rig.target(transfer))
        (report,) = await rig.quiet(transfer.transfer_id)
        assert report.reason == "STALE_INCARNATION"
        assert transfer.state is TransferState.RESERVED


async def test_layout_mismatch_names_the_fields() -> None:
    (group,) = make_layout(1).groups
    parts = tuple(replace(part, dtype="bfloat16") for part in group.parts)
    other = replace(group, head_count=8, block_tokens=8, parts=parts)
    prefill = replace(make_layout(1), groups=(other,))
    async with running(prefill, make_layout(1), memory_transports()) as rig:
        transfer = rig.reserve(TOKENS)
        rig.open(rig.target(transfer))
        (report,) = await rig.quiet(transfer.transfer_id)
        assert report.reason == "LAYOUT_MISMATCH"
        assert "attention.k.dtype (float32 != bfloat16)" in report.detail
        assert "attention.head_count" in report.detail
        assert "block_tokens" not in report.detail


async def test_unreachable_decode_worker_fails_the_transfer() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{unused.getsockname()[1]}"
        async with running(make_layout(1), make_layout(1), memory_transports()) as rig:
            transfer = rig.reserve(TOKENS)
            rig.open(replace(rig.target(transfer), handoff_endpoint=endpoint))
            (report,) = await rig.quiet(transfer.transfer_id)
            assert report.reason == "TRANSFER_FAILED"


async def test_unknown_transfer_is_refused_after_a_short_wait() -> None:
    limits = ReceiverLimits(open_wait_s=0.1)
    async with running(
        make_layout(1), make_layout(1), memory_transports(), receiver_limits=limits
    ) as rig:
        target = replace(rig.target(rig.reserve(TOKENS)), transfer_id="x" + "0" * 32)
        rig.open(target)
        (report,) = await rig.quiet(target.transfer_id)
        assert report.reason == "NOT_FOUND"


def hello(rig: Rig, incarnation: str, rank: int = 0) -> handoff_pb2.HandoffRequest:
    return handoff_pb2.HandoffRequest(
        hello=handoff_pb2.Hello(
            worker_id="prefill-9",
            incarnation=incarnation,
            rank=rank,
            layout=layout_to_proto(rig.prefill),
            decode_worker_id=rig.decode_ref.worker_id,
            decode_incarnation=rig.decode_ref.incarnation,
        )
    )


def opened(transfer_id: str) -> handoff_pb2.HandoffRequest:
    return handoff_pb2.HandoffRequest(open=handoff_pb2.Open(transfer_id=transfer_id))


async def test_a_second_sender_is_refused_and_garbage_harms_nobody() -> None:
    async with running(make_layout(1), make_layout(1), memory_transports()) as rig:
        truth = rig.fill(BLOCKS, seed=1)
        transfer = rig.reserve(TOKENS)
        rig.open(rig.target(transfer))
        await until(lambda: transfer.state is TransferState.OPEN)
        async with open_channel(rig.endpoint) as channel:
            call = handoff_pb2_grpc.HandoffServiceStub(channel).Handoff()
            await call.write(hello(rig, "b" * 16))
            await call.read()
            await call.write(handoff_pb2.HandoffRequest())
            await call.write(hello(rig, "b" * 16))
            await call.write(opened(transfer.transfer_id))
            refused = await call.read()
            assert isinstance(refused, handoff_pb2.HandoffResponse)
            assert refused.cancel.reason == "PROTOCOL_VIOLATION"
            foreign = handoff_pb2.LayerDone(transfer_id=transfer.transfer_id, layer=99)
            for message in (
                handoff_pb2.HandoffRequest(
                    layers_done=handoff_pb2.LayersDone(layers=[foreign, handoff_pb2.LayerDone()])
                ),
                handoff_pb2.HandoffRequest(
                    commit=handoff_pb2.Commit(transfer_id=transfer.transfer_id)
                ),
                handoff_pb2.HandoffRequest(
                    failed=handoff_pb2.Failed(transfer_id=transfer.transfer_id)
                ),
                handoff_pb2.HandoffRequest(
                    quiesced=handoff_pb2.Quiesced(transfer_id=transfer.transfer_id)
                ),
            ):
                await call.write(message)
            await asyncio.sleep(0.1)
            assert transfer.active
            rig.push(transfer.transfer_id, BLOCKS, 0, TOKENS)
            await transfer.wait()
            rig.check_bytes(truth, transfer.reservation)
            call.cancel()


async def test_wrong_acknowledgement_fails_its_own_transfer() -> None:
    async with running(make_layout(1), make_layout(1), memory_transports()) as rig:
        for layer in (
            handoff_pb2.LayerDone(layer=99, start_token=0, end_token=TOKENS),
            handoff_pb2.LayerDone(layer=0, start_token=4, end_token=TOKENS),
            handoff_pb2.LayerDone(layer=0, start_token=0, end_token=TOKENS, payload_bytes=1),
        ):
            transfer = rig.reserve(TOKENS)
            async with open_channel(rig.endpoint) as channel:
                call = handoff_pb2_grpc.HandoffServiceStub(channel).Handoff()
                await call.write(hello(rig, "b" * 16))
                await call.write(opened(transfer.transfer_id))
                layer.transfer_id = transfer.transfer_id
                await call.write(
                    handoff_pb2.HandoffRequest(layers_done=handoff_pb2.LayersDone(layers=[layer]))
                )
                with pytest.raises(ProtocolViolation, match=f"layer {layer.layer} from rank 0"):
                    await transfer.wait()
                assert transfer.transfer_id not in rig.released_ids()
                await call.write(
                    handoff_pb2.HandoffRequest(
                        quiesced=handoff_pb2.Quiesced(transfer_id=transfer.transfer_id)
                    )
                )
                await until(lambda t=transfer: t.transfer_id in rig.released_ids())  # type: ignore[misc]
                call.cancel()


async def test_hello_is_checked() -> None:
    async with running(make_layout(2), make_layout(1), memory_transports()) as rig:
        stale = hello(rig, "b" * 16)
        stale.hello.decode_incarnation = "0" * 16
        foreign = hello(rig, "b" * 16)
        foreign.hello.layout.groups[0].parts[0].dtype = "bfloat16"
        empty = hello(rig, "b" * 16)
        empty.hello.layout.tensor_parallel_size = 0
        stageless = hello(rig, "b" * 16)
        stageless.hello.layout.stage_starts[:] = [2]
        cases = [
            (stale, StaleIncarnation, "decode-0@0000"),
            (foreign, LayoutMismatch, "dtype"),
            (empty, LayoutMismatch, "0 ranks cannot share 4 heads"),
            (stageless, LayoutMismatch, "stages from layers 2"),
            (hello(rig, "b" * 16, rank=2), ProtocolViolation, "no rank 2"),
            (opened("x"), ProtocolViolation, "Hello"),
        ]
        for first, kind, detail in cases:
            async with open_channel(rig.endpoint) as channel:
                call = handoff_pb2_grpc.HandoffServiceStub(channel).Handoff()
                await call.write(first)
                error: Exception | None = None
                try:
                    await call.read()
                except Exception as problem:  # noqa: BLE001 - the class is what is tested
                    error = problem
                mapped = error_from_rpc(error)  # type: ignore[arg-type]
                assert isinstance(mapped, kind)
                assert detail in mapped.detail


async def test_rank_that_never_answers_loses_its_stream() -> None:
    limits = ReceiverLimits(quiesce_timeout_s=0.2)
    async with running(
        make_layout(1),
        make_layout(1),
        memory_transports(),
        receiver_limits=limits,
        lease_ttl_s=0.2,
        quarantine_s=0.2,
    ) as rig:
        transfer = rig.reserve(TOKENS)
        async with open_channel(rig.endpoint) as channel:
            call = handoff_pb2_grpc.HandoffServiceStub(channel).Handoff()
            await call.write(hello(rig, "b" * 16))
            await call.write(opened(transfer.transfer_id))
            await until(lambda: transfer.state is TransferState.OPEN)
            start = time.monotonic()
            rig.receiver.cancel(transfer.transfer_id, "CANCELLED", "the client left")
            await until(lambda: bool(rig.released))
            assert rig.released[0][1] - start >= 0.2 + 2 * 0.2 + 0.2 - 0.05
            call.cancel()


async def test_drain_waits_then_ends_everything() -> None:
    async with running(make_layout(1), make_layout(1), memory_transports()) as rig:
        rig.fill(BLOCKS, seed=1)
        whole, stuck = rig.reserve(TOKENS), rig.reserve(TOKENS)
        for transfer in (whole, stuck):
            rig.open(rig.target(transfer))
        drain = asyncio.create_task(rig.receiver.drain(2.0))
        await asyncio.sleep(0.05)
        rig.push(whole.transfer_id, BLOCKS, 0, TOKENS)
        await whole.wait()
        await drain
        with pytest.raises(TransferFailed, match="shutting down"):
            await stuck.wait()
        assert rig.receiver.active_count == 0
        await rig.quiet(stuck.transfer_id)


PEER = """
import sys
import numpy as np
from headrace_kv.transport.factory import open_transport
memory = np.zeros(1 << 20, dtype=np.uint8)
transport = open_transport("mooncake", "127.0.0.1", "tcp")
transport.register(memory.ctypes.data, memory.nbytes)
print(transport.session, memory.ctypes.data, flush=True)
for line in sys.stdin:
    print(int(memory.sum()), flush=True)
"""


def start_peer() -> tuple[subprocess.Popen[str], str, int]:
    process = subprocess.Popen(
        [sys.executable, "-c", PEER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    session, address = process.stdout.readline().split()
    return process, session, int(address)


def end_peer(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait(timeout=5)
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()


def test_mooncake_outlives_a_killed_peer() -> None:
    """After a failed write the transport has a fresh engine: another peer is reached at once."""
    first, second = start_peer(), start_peer()
    transport = open_transport("mooncake", "127.0.0.1", "tcp")
    memory = np.ones(1 << 20, dtype=np.uint8)
    transport.register(memory.ctypes.data, memory.nbytes)

    def runs(address: int, count: int = 600) -> Runs:
        steps = np.arange(count, dtype=np.int64) * 1024
        lengths = np.full(count, 512, dtype=np.int64)
        return Runs(memory.ctypes.data + steps, address + steps, lengths)

    try:
        transport.write(first[1], runs(first[2]), 5.0)
        os.kill(first[0].pid, signal.SIGKILL)
        first[0].wait(timeout=5)
        with pytest.raises(TransferFailed, match="could not write"):
            transport.write(first[1], runs(first[2]), 5.0)
        # By now the rest that the peer gets may be over.
        with pytest.raises(TransferFailed, match=r"nothing was written|does not reach"):
            transport.write(first[1], runs(first[2]), 5.0)
        transport.write(second[1], runs(second[2]), 5.0)
        assert second[0].stdin is not None
        assert second[0].stdout is not None
        print("sum", file=second[0].stdin, flush=True)
        assert int(second[0].stdout.readline()) == 600 * 512
    finally:
        transport.close()
        end_peer(first[0])
        end_peer(second[0])


def test_mooncake_writes_nothing_more_after_a_failure() -> None:
    """A peer stands still, the write fails, the source changes, the peer goes on: no changed byte lands."""
    process, session, address = start_peer()
    transport = open_transport("mooncake", "127.0.0.1", "tcp")
    memory = np.ones(64 << 20, dtype=np.uint8)
    transport.register(memory.ctypes.data, memory.nbytes)

    def one(length: int) -> Runs:
        return Runs(np.array([memory.ctypes.data]), np.array([address]), np.array([length]))

    try:
        transport.write(session, one(1024), 5.0)
        os.kill(process.pid, signal.SIGSTOP)
        # Rewriting the peer's MiB 60 times fills its sockets' buffers many times over.
        many = Runs(
            memory.ctypes.data + (np.arange(60, dtype=np.int64) << 20),
            np.full(60, address, dtype=np.int64),
            np.full(60, 1 << 20, dtype=np.int64),
        )
        with pytest.raises(TransferFailed):
            transport.write(session, many, 5.0)
        memory[:] = 100
        os.kill(process.pid, signal.SIGCONT)
        time.sleep(transport.quiet_after_failure_s)
        assert process.stdin is not None
        assert process.stdout is not None
        print("sum", file=process.stdin, flush=True)
        assert int(process.stdout.readline()) <= 1 << 20
    finally:
        transport.close()
        end_peer(process)


async def test_writes_wait_for_nobody_else() -> None:
    """A transfer without its reservation does not hold up another one of the same rank."""
    async with running(make_layout(1), make_layout(1), memory_transports()) as rig:
        truth = rig.fill(BLOCKS, seed=1)
        fine = rig.reserve(TOKENS)
        waiting = replace(rig.target(fine), transfer_id="x" + "0" * 32)
        rig.open(waiting)
        rig.push(waiting.transfer_id, BLOCKS, 0, TOKENS)
        rig.open(rig.target(fine))
        rig.push(fine.transfer_id, BLOCKS, 0, TOKENS)
        await asyncio.wait_for(fine.wait(), 2.0)
        rig.check_bytes(truth, fine.reservation)
