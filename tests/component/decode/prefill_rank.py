"""A prefill rank's end of a handoff stream, and waits for events of a decode service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from headrace.kv.v1 import handoff_pb2, handoff_pb2_grpc
from headrace_common.errors import HeadraceError
from headrace_kv.hidden_state import HiddenFormat
from headrace_kv.layout import WorkerRef, layout_to_proto
from headrace_kv.messages import Reservation
from tests.component.decode.scripted_engine import LAYOUT, REF
from tests.linked_call import LinkedCall
from tests.router_key import RouterKey
from tests.waiting import PATIENCE_S

RESERVATION = Reservation("x1", (3, 4, 5), 0, 39)
PREFILL_REF = WorkerRef("prefill-0", "ab" * 8)
ROUTER = RouterKey()
PIECE_BYTES = LAYOUT.groups[0].bytes_between(0, 39, heads=2)


async def failure_of(call: LinkedCall) -> HeadraceError:
    with pytest.raises(HeadraceError) as raised:
        async for _ in call:
            pass
    return raised.value


async def next_event(call: LinkedCall) -> str:
    return (await asyncio.wait_for(anext(call), PATIENCE_S)).kind


def ticket_of(name: str) -> bytes:
    """The ticket of a transfer for the rank's worker."""
    return ROUTER.ticket(name, prefill=PREFILL_REF, decode=REF, layout=LAYOUT)


HIDDEN_FORMAT = HiddenFormat("float32", 20)


class PrefillRank:
    """Sends the messages of a prefill rank on a handoff stream, without writing bytes."""

    def __init__(
        self,
        stub: handoff_pb2_grpc.HandoffServiceAsyncStub,
        hidden_format: HiddenFormat | None = HIDDEN_FORMAT,
    ) -> None:
        self._outgoing: asyncio.Queue[handoff_pb2.HandoffRequest] = asyncio.Queue()
        self._call = stub.Handoff(self._requests())
        hello = handoff_pb2.Hello(
            worker_id=PREFILL_REF.worker_id,
            incarnation=PREFILL_REF.incarnation,
            layout=layout_to_proto(LAYOUT),
            decode_worker_id=REF.worker_id,
            decode_incarnation=REF.incarnation,
            hidden_format=hidden_format.to_proto() if hidden_format else None,
        )
        self.send(hello=hello)

    async def _requests(self) -> AsyncIterator[handoff_pb2.HandoffRequest]:
        while True:
            yield await self._outgoing.get()

    def send(self, **message: object) -> None:
        self._outgoing.put_nowait(handoff_pb2.HandoffRequest(**message))  # type: ignore[arg-type]

    async def receive(self, kind: str) -> handoff_pb2.HandoffResponse:
        async with asyncio.timeout(PATIENCE_S):
            async for response in self._call:
                if response.WhichOneof("message") == kind:
                    return response
        raise AssertionError(f"the stream ended before {kind}")

    async def open(self, name: str = "x1") -> None:
        self.send(open=handoff_pb2.Open(transfer_id=name, ticket=ticket_of(name)))
        await self.receive("reservation")

    def land(self, *layers: int, name: str = "x1") -> None:
        done = [
            handoff_pb2.LayerDone(
                transfer_id=name,
                layer=layer,
                start_token=0,
                end_token=39,
                payload_bytes=PIECE_BYTES,
            )
            for layer in layers
        ]
        self.send(layers_done=handoff_pb2.LayersDone(layers=done))

    def leave(self) -> None:
        self._call.cancel()
