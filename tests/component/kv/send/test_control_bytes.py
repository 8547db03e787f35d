"""Bytes of a request on the handoff stream: block ids and layers, without descriptors after the first request."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from headrace.kv.v1 import handoff_pb2
from headrace_common.deadlines import Deadline
from headrace_kv.handoff.messages import SendReport
from headrace_kv.layout.layout import KvDescriptor, WorkerRef
from headrace_kv.receive import service
from headrace_kv.receive.receiver import Receiver
from headrace_kv.receive.service import unpacked
from headrace_kv.receive.transfer import PrefillPeer
from headrace_kv.send.context import SenderContext
from headrace_kv.send.sender import RankSender
from tests.component.kv import harness
from tests.component.kv.harness import BLOCK_TOKENS, Rig, make_layout, running
from tests.waiting import until


class Wire:
    """Counts the messages on the streams, by transfer, and records the queries for descriptors."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.messages: dict[str, Counter[str]] = defaultdict(Counter)
        self.message_bytes = 0
        self.layer_messages = 0
        self.batches: list[tuple[str, ...]] = []
        self.queries: list[WorkerRef] = []
        monkeypatch.setattr(harness, "Receiver", self._receiver_class())
        monkeypatch.setattr(harness, "RankSender", self._sender)
        monkeypatch.setattr(service, "unpacked", self._unpacked)

    def _receiver_class(self) -> type[Receiver]:
        wire = self

        class RecordingReceiver(Receiver):
            def connect(self, hello: handoff_pb2.Hello, send: Any, end: Any) -> PrefillPeer:
                def record_and_send(response: handoff_pb2.HandoffResponse) -> None:
                    wire.record(response)
                    send(response)

                return super().connect(hello, record_and_send, end)

            def handle(self, peer: PrefillPeer, request: handoff_pb2.HandoffRequest) -> None:
                wire.record(request)
                super().handle(peer, request)

        return RecordingReceiver

    def _unpacked(
        self, request: handoff_pb2.HandoffRequest
    ) -> Sequence[handoff_pb2.HandoffRequest]:
        found = unpacked(request)
        self.batches.append(tuple(str(one.WhichOneof("message")) for one in found))
        return found

    def _sender(self, context: SenderContext, **settings: Any) -> RankSender:
        inner = context.descriptors

        async def query(ref: WorkerRef, deadline: Deadline) -> KvDescriptor:
            self.queries.append(ref)
            return await inner(ref, deadline)

        return RankSender(replace(context, descriptors=query), **settings)

    def record(self, message: handoff_pb2.HandoffRequest | handoff_pb2.HandoffResponse) -> None:
        kind = message.WhichOneof("message")
        assert kind is not None
        self.message_bytes += message.ByteSize()
        if kind == "layers_done":
            assert isinstance(message, handoff_pb2.HandoffRequest)
            self.layer_messages += 1
            for layer in message.layers_done.layers:
                self.messages[layer.transfer_id]["layer"] += 1
        else:
            self.messages[getattr(message, kind).transfer_id][kind] += 1


async def send(rig: Rig, block_count: int) -> list[SendReport]:
    """One request of whole blocks, in one chunk."""
    token_count = block_count * BLOCK_TOKENS
    transfer = rig.start(token_count, first_block=block_count - 1)
    rig.push(transfer.transfer_id, tuple(range(block_count)), 0, token_count)
    await transfer.wait()
    return await rig.quiet(transfer.transfer_id)


async def test_descriptors_are_queried_once_and_requests_carry_block_ids(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wire = Wire(monkeypatch)
    async with running(2, 2) as rig:
        for _ in range(20):
            for report in await send(rig, 3):
                assert report.reason == ""
        assert wire.queries == [rig.decode_ref] * 2
        assert len(wire.messages) == 20
        expected = {"open": 2, "reservation": 2, "layer": 12, "commit": 2}
        await until(lambda: all(counts == expected for counts in wire.messages.values()))
        # A rank's last acknowledgement waits for its Commit, however fast the machine is.
        together = sum(batch[-2:] == ("layers_done", "commit") for batch in wire.batches)
        assert together > len(wire.messages)


async def test_counted_bytes_are_those_on_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire(monkeypatch)
    async with running(2, 4) as rig:
        counted = 0
        for blocks in (1, 7, 30):
            counted += sum(report.control_bytes for report in await send(rig, blocks))
        await until(lambda: all(counts["commit"] == 2 for counts in wire.messages.values()))
        # Each message of LayerDones has a frame of 2 to 6 bytes, which counts for no transfer.
        assert counted + 2 * wire.layer_messages <= wire.message_bytes
        assert wire.message_bytes <= counted + 6 * wire.layer_messages


async def test_bytes_grow_with_blocks_and_layers_only() -> None:
    found: dict[tuple[int, int], int] = {}
    for layers in (6, 12):
        layout = make_layout(1, layers=layers)
        async with running(layout, layout) as rig:
            for blocks in (4, 8, 32):
                sizes = set()
                for _ in range(3):
                    (report,) = await send(rig, blocks)
                    sizes.add(report.control_bytes)
                (found[layers, blocks],) = sizes
    # Block ids below 128 take one byte each. Larger token and byte counts take one byte more in places.
    for layers in (6, 12):
        assert 4 <= found[layers, 8] - found[layers, 4] <= 4 + layers + 3
        assert 24 <= found[layers, 32] - found[layers, 8] <= 24 + 2 * layers + 3
    per_layer = (found[12, 32] - found[6, 32]) / 6
    assert 40 <= per_layer <= 60
    # Some 200 bytes of it are the handoff ticket.
    assert found[12, 32] - 12 * per_layer < 400


async def test_a_cancelled_request_is_counted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire(monkeypatch)
    async with running() as rig:
        transfer = rig.start()
        await until(lambda: wire.messages[transfer.transfer_id]["reservation"] == 1)
        rig.receiver.cancel(transfer.transfer_id, "CANCELLED", "the client left")
        (report,) = await rig.quiet(transfer.transfer_id)
        await until(lambda: wire.messages[transfer.transfer_id]["quiesced"] == 1)
        assert report.control_bytes == wire.message_bytes
