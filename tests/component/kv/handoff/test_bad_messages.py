"""What a receiver does with messages that a correct sender never sends, over a raw stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from headrace.kv.v1 import handoff_pb2, handoff_pb2_grpc
from headrace_common.errors import LayoutMismatch, ProtocolViolation, StaleIncarnation
from headrace_common.rpc.channel import open_channel
from headrace_common.rpc.status import error_from_rpc
from headrace_kv.layout.proto import layout_to_proto
from headrace_kv.receive.receiver import ReceiverLimits
from headrace_kv.receive.state import TransferState
from tests.component.kv.harness import BLOCK_TOKENS, Rig, make_layout, memory_transports, running
from tests.waiting import until

BLOCKS = (1, 2, 3)
TOKENS = 3 * BLOCK_TOKENS


@asynccontextmanager
async def raw_stream(rig: Rig, *messages: handoff_pb2.HandoffRequest) -> AsyncIterator[Any]:
    """A handoff stream on which `messages` have been sent."""
    async with open_channel(rig.endpoint) as channel:
        call = handoff_pb2_grpc.HandoffServiceStub(channel).Handoff()
        for message in messages:
            await call.write(message)
        yield call
        call.cancel()


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


def opening(transfer_id: str) -> handoff_pb2.HandoffRequest:
    return handoff_pb2.HandoffRequest(open=handoff_pb2.Open(transfer_id=transfer_id))


async def test_a_second_sender_is_refused_and_garbage_fails_no_transfer() -> None:
    async with running(make_layout(1), make_layout(1), memory_transports()) as rig:
        truth = rig.fill(BLOCKS, seed=1)
        transfer = rig.reserve(TOKENS)
        rig.open(rig.target(transfer))
        await until(lambda: transfer.state is TransferState.OPEN)
        async with raw_stream(rig, hello(rig, "b" * 16)) as call:
            await call.read()
            await call.write(handoff_pb2.HandoffRequest())
            await call.write(hello(rig, "b" * 16))
            await call.write(opening(transfer.transfer_id))
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


async def test_wrong_acknowledgement_fails_its_own_transfer() -> None:
    async with running(make_layout(1), make_layout(1), memory_transports()) as rig:
        for layer in (
            handoff_pb2.LayerDone(layer=99, start_token=0, end_token=TOKENS),
            handoff_pb2.LayerDone(layer=0, start_token=4, end_token=TOKENS),
            handoff_pb2.LayerDone(layer=0, start_token=0, end_token=TOKENS, payload_bytes=1),
        ):
            transfer = rig.reserve(TOKENS)
            layer.transfer_id = transfer.transfer_id
            landed = handoff_pb2.HandoffRequest(layers_done=handoff_pb2.LayersDone(layers=[layer]))
            messages = hello(rig, "b" * 16), opening(transfer.transfer_id), landed
            async with raw_stream(rig, *messages) as call:
                with pytest.raises(ProtocolViolation, match=f"layer {layer.layer} from rank 0"):
                    await transfer.wait()
                assert transfer.transfer_id not in rig.released_ids()
                await call.write(
                    handoff_pb2.HandoffRequest(
                        quiesced=handoff_pb2.Quiesced(transfer_id=transfer.transfer_id)
                    )
                )
                await until(lambda t=transfer: t.transfer_id in rig.released_ids())  # type: ignore[misc]


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
            (opening("x"), ProtocolViolation, "Hello"),
        ]
        for first, kind, detail in cases:
            async with raw_stream(rig, first) as call:
                error: Exception | None = None
                try:
                    await call.read()
                except Exception as problem:  # noqa: BLE001 - the class is what is tested
                    error = problem
                mapped = error_from_rpc(error)  # type: ignore[arg-type]
                assert isinstance(mapped, kind)
                assert detail in mapped.detail


async def test_blocks_of_a_rank_that_never_quiesces_are_quarantined() -> None:
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
        async with raw_stream(rig, hello(rig, "b" * 16), opening(transfer.transfer_id)):
            await until(lambda: transfer.state is TransferState.OPEN)
            start = time.monotonic()
            rig.receiver.cancel(transfer.transfer_id, "CANCELLED", "the client left")
            await until(lambda: bool(rig.released))
            assert rig.released[0][1] - start >= 0.2 + 2 * 0.2 + 0.2 - 0.05
