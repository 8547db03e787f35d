"""What a receiver does with messages that a correct sender never sends, over a raw stream."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest

from headrace.kv.v1 import handoff_pb2, handoff_pb2_grpc
from headrace_common.errors import LayoutMismatch, ProtocolViolation, StaleIncarnation
from headrace_common.rpc.channel import open_channel
from headrace_common.rpc.status import error_from_rpc
from headrace_kv.layout import WorkerRef, layout_to_proto
from headrace_kv.receive.transfer import TransferState
from tests.component.kv.harness import TOKENS, Rig, running
from tests.waiting import until

STRANGER = WorkerRef("prefill-9", "b" * 16)


@asynccontextmanager
async def raw_stream(rig: Rig, *messages: handoff_pb2.HandoffRequest) -> AsyncIterator[Any]:
    """A handoff stream on which `messages` have been sent."""
    async with open_channel(rig.endpoint) as channel:
        call = handoff_pb2_grpc.HandoffServiceStub(channel).Handoff()
        for message in messages:
            await call.write(message)
        yield call
        call.cancel()


def hello(rig: Rig, rank: int = 0) -> handoff_pb2.HandoffRequest:
    return handoff_pb2.HandoffRequest(
        hello=handoff_pb2.Hello(
            worker_id=STRANGER.worker_id,
            incarnation=STRANGER.incarnation,
            rank=rank,
            layout=layout_to_proto(rig.prefill),
            decode_worker_id=rig.decode_ref.worker_id,
            decode_incarnation=rig.decode_ref.incarnation,
        )
    )


def opening(rig: Rig, name: str) -> handoff_pb2.HandoffRequest:
    """An Open with the ticket that the router has given to the raw stream's worker."""
    ticket = rig.ticket(name, STRANGER)
    return handoff_pb2.HandoffRequest(open=handoff_pb2.Open(transfer_id=name, ticket=ticket))


def message(kind: str, transfer_id: str) -> handoff_pb2.HandoffRequest:
    """A message without more than a transfer's id."""
    request = handoff_pb2.HandoffRequest()
    getattr(request, kind).transfer_id = transfer_id
    return request


def batch(*requests: handoff_pb2.HandoffRequest) -> handoff_pb2.HandoffRequest:
    return handoff_pb2.HandoffRequest(batch=handoff_pb2.HandoffRequestBatch(requests=requests))


def layers_done(*layers: handoff_pb2.LayerDone) -> handoff_pb2.HandoffRequest:
    return handoff_pb2.HandoffRequest(layers_done=handoff_pb2.LayersDone(layers=layers))


async def test_a_second_sender_is_refused_and_garbage_fails_no_transfer() -> None:
    async with running() as rig:
        transfer = rig.start()
        name = transfer.transfer_id
        await until(lambda: transfer.state is TransferState.OPEN)
        async with raw_stream(rig, hello(rig)) as call:
            await call.read()
            nested = batch(batch(opening(rig, name)), hello(rig))
            for request in (handoff_pb2.HandoffRequest(), hello(rig), nested, opening(rig, name)):
                await call.write(request)
            refused = await call.read()
            assert isinstance(refused, handoff_pb2.HandoffResponse)
            assert refused.cancel.reason == "PROTOCOL_VIOLATION"
            # Nothing in the batch was an Open, so only the last request was answered.
            foreign = handoff_pb2.LayerDone(transfer_id=name, layer=99)
            await call.write(layers_done(foreign, handoff_pb2.LayerDone()))
            for kind in ("commit", "failed", "quiesced"):
                await call.write(message(kind, name))
            await call.write(batch(message("commit", name), opening(rig, name)))
            again = await call.read()
            assert isinstance(again, handoff_pb2.HandoffResponse)
            assert again.cancel.reason == "PROTOCOL_VIOLATION"
            assert transfer.active
            rig.push(name)
            await rig.received(transfer)


@pytest.mark.parametrize("layer, start_token, payload_bytes", [(99, 0, 0), (0, 4, 0), (0, 0, 1)])
async def test_wrong_acknowledgement_fails_its_own_transfer(
    layer: int, start_token: int, payload_bytes: int
) -> None:
    async with running() as rig:
        transfer = rig.reserve()
        name = transfer.transfer_id
        wrong = handoff_pb2.LayerDone(
            transfer_id=name,
            layer=layer,
            start_token=start_token,
            end_token=TOKENS,
            payload_bytes=payload_bytes,
        )
        async with raw_stream(rig, hello(rig), opening(rig, name), layers_done(wrong)) as call:
            with pytest.raises(ProtocolViolation, match=f"layer {layer} from rank 0"):
                await transfer.wait()
            assert not rig.released
            await call.write(message("quiesced", name))
            await until(lambda: rig.released_ids() == [name])


async def test_hello_is_checked() -> None:
    async with running(2, 1) as rig:
        stale = hello(rig)
        stale.hello.decode_incarnation = "0" * 16
        foreign = hello(rig)
        foreign.hello.layout.groups[0].parts[0].dtype = "bfloat16"
        empty = hello(rig)
        empty.hello.layout.tensor_parallel_size = 0
        stageless = hello(rig)
        stageless.hello.layout.stage_starts[:] = [2]
        cases = [
            (stale, StaleIncarnation, "decode-0@0000"),
            (foreign, LayoutMismatch, "dtype"),
            (empty, LayoutMismatch, "tensor_parallel_size"),
            (stageless, LayoutMismatch, "stages from layers 2"),
            (hello(rig, rank=2), ProtocolViolation, "no rank 2"),
            (message("open", "x"), ProtocolViolation, "Hello"),
        ]
        for first, kind, detail in cases:
            async with raw_stream(rig, first) as call:
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    await call.read()
                mapped = error_from_rpc(raised.value)
                assert isinstance(mapped, kind)
                assert detail in mapped.detail
