"""Prefill ranks that have no handoff ticket, or another one, can do nothing to a transfer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc.aio
import pytest

from headrace.kv.v1 import handoff_pb2
from headrace_common.deadlines import Deadline
from headrace_common.errors import KvCorrupt, TransferFailed, Unauthenticated
from headrace_common.limits import TICKET_BYTES_MAX
from headrace_common.rpc.status import error_from_rpc
from headrace_common.tickets import SigningKey, TicketKey
from headrace_kv.layout import WorkerRef
from headrace_kv.messages import Reservation
from headrace_kv.receive.transfer import TransferState
from headrace_kv.send import transfer as send_transfer
from headrace_kv.tickets import digest_seed
from tests.component.kv.handoff.test_bad_messages import (
    STRANGER,
    hello,
    layers_done,
    message,
    raw_stream,
)
from tests.component.kv.harness import BLOCK_TOKENS, TOKENS, Rig, make_layout, running
from tests.component.kv.receive.test_verification import checks
from tests.waiting import PATIENCE_S, until

Forge = Callable[[Rig, str], bytes]
UNKNOWN = SigningKey()


def stolen(rig: Rig, name: str) -> bytes:
    """The ticket of the worker that has the task."""
    return rig.ticket(name)


def of_another_incarnation(rig: Rig, name: str) -> bytes:
    return rig.ticket(name, STRANGER._replace(incarnation="c" * 16))


def for_another_transfer(rig: Rig, name: str) -> bytes:
    return rig.ticket("x" + "9" * 32, STRANGER)


def for_another_decode_worker(rig: Rig, name: str) -> bytes:
    other = WorkerRef("decode-7", rig.decode_ref.incarnation)
    return rig.router.ticket(name, prefill=STRANGER, decode=other, layout=rig.decode)


def for_an_older_decode_worker(rig: Rig, name: str) -> bytes:
    older = rig.decode_ref._replace(incarnation="0" * 16)
    return rig.router.ticket(name, prefill=STRANGER, decode=older, layout=rig.decode)


def for_another_layout(rig: Rig, name: str) -> bytes:
    other = replace(make_layout(1), model="other")
    return rig.router.ticket(name, prefill=STRANGER, decode=rig.decode_ref, layout=other)


def self_signed(rig: Rig, name: str) -> bytes:
    return rig.router.ticket(
        name, prefill=STRANGER, decode=rig.decode_ref, layout=rig.decode, key=UNKNOWN
    )


def self_signed_in_the_router_s_name(rig: Rig, name: str) -> bytes:
    ticket = handoff_pb2.HandoffTicket.FromString(self_signed(rig, name))
    ticket.key_id = rig.router.key_id
    return ticket.SerializeToString()


FORGED: dict[Forge, tuple[str, str]] = {
    lambda rig, name: b"": ("UNAUTHENTICATED", "missing"),
    lambda rig, name: b"\xff" * 99: ("UNAUTHENTICATED", "signature"),
    lambda rig, name: bytes(TICKET_BYTES_MAX): ("UNAUTHENTICATED", "signature"),
    stolen: ("PERMISSION_DENIED", "prefill_worker_id"),
    of_another_incarnation: ("PERMISSION_DENIED", "prefill_incarnation"),
    for_another_transfer: ("PERMISSION_DENIED", "transfer_id"),
    for_another_decode_worker: ("PERMISSION_DENIED", "decode_worker_id"),
    for_an_older_decode_worker: ("PERMISSION_DENIED", "decode_incarnation"),
    for_another_layout: ("PERMISSION_DENIED", "layout_hash"),
    self_signed: ("UNAUTHENTICATED", "key_id"),
    self_signed_in_the_router_s_name: ("UNAUTHENTICATED", "signature"),
}


def opening(name: str, ticket: bytes) -> handoff_pb2.HandoffRequest:
    return handoff_pb2.HandoffRequest(open=handoff_pb2.Open(transfer_id=name, ticket=ticket))


def whole_transfer(rig: Rig, name: str) -> list[handoff_pb2.HandoffRequest]:
    """What the genuine sender would say at the end, and what ends a transfer."""
    layout = rig.decode
    heads = layout.groups[0].head_count
    layers = [
        handoff_pb2.LayerDone(
            transfer_id=name,
            layer=layer,
            end_token=TOKENS,
            payload_bytes=layout.group_of(layer).bytes_between(0, TOKENS, heads),
        )
        for layer in range(layout.layer_count)
    ]
    state = handoff_pb2.HiddenState(transfer_id=name, data=bytes(8), digest=0)
    return [
        layers_done(*layers),
        handoff_pb2.HandoffRequest(hidden_state=state),
        *(message(kind, name) for kind in ("commit", "failed", "quiesced")),
    ]


async def read_all(call: Any) -> None:
    async for _ in call:
        pass


async def refusal(call: Any) -> tuple[str, str]:
    """The reason and the claim of the next Cancel."""
    response = await asyncio.wait_for(call.read(), PATIENCE_S)
    assert response.WhichOneof("message") == "cancel", response
    return response.cancel.reason, response.cancel.refused_claim


@pytest.mark.parametrize("forge", FORGED, ids=lambda forge: getattr(forge, "__name__", ""))
@pytest.mark.parametrize("opened", [False, True], ids=["reserved", "opened"])
async def test_a_forged_ticket_is_refused_by_claim_and_the_transfer_goes_on(
    forge: Forge, opened: bool
) -> None:
    async with running() as rig:
        transfer = rig.start() if opened else rig.reserve()
        name = transfer.transfer_id
        state = TransferState.OPEN if opened else TransferState.RESERVED
        await until(lambda: transfer.state is state)
        async with raw_stream(rig, hello(rig), opening(name, forge(rig, name))) as call:
            await call.read()
            assert await refusal(call) == FORGED[forge]
            for request in whole_transfer(rig, name):
                await call.write(request)
            # The answer to a second forged Open comes after everything before it was processed.
            await call.write(opening(name, b""))
            assert await refusal(call) == ("UNAUTHENTICATED", "missing")
            assert transfer.state is state
            if not opened:
                rig.open(rig.target(transfer))
            rig.push(name)
            await rig.received(transfer)
        refused = FORGED[forge][1]
        assert rig.router.refused == [refused, "missing"]


async def test_a_ticket_of_another_router_than_the_reserving_one_is_refused() -> None:
    async with running() as rig:
        other = SigningKey()
        rig.router.known.use(other.public.public_key)
        name, blocks = "x" + "2" * 32, tuple(range(-(-TOKENS // BLOCK_TOKENS)))
        transfer = rig.receiver.reserve(
            Reservation(name, blocks, 0, TOKENS),
            Deadline.after(20.0),
            signer=rig.router.key.public,
        )
        ticket = rig.router.ticket(
            name, prefill=STRANGER, decode=rig.decode_ref, layout=rig.decode, key=other
        )
        async with raw_stream(rig, hello(rig), opening(name, ticket)) as call:
            await call.read()
            assert await refusal(call) == ("UNAUTHENTICATED", "key_id")
        # A reservation by a ticket may be sent to any router.
        direct = rig.reserve()
        ticket = rig.router.ticket(
            direct.transfer_id,
            prefill=STRANGER,
            decode=rig.decode_ref,
            layout=rig.decode,
            key=other,
        )
        async with raw_stream(rig, hello(rig), opening(direct.transfer_id, ticket)):
            await until(lambda: direct.state is TransferState.OPEN)
        assert transfer.state is TransferState.RESERVED


async def test_a_key_that_was_forgotten_since_the_reservation_still_counts_for_it() -> None:
    """The status stream of a router may end while its request runs."""
    async with running() as rig:
        router = SigningKey()
        use = rig.router.known.use(router.public.public_key)
        name = "x" + "3" * 32
        transfer = rig.receiver.reserve(
            Reservation(name, (1, 2), 0, BLOCK_TOKENS), Deadline.after(20.0), signer=router.public
        )
        use.end()
        rig.router.known._kept_s = 0.0
        assert rig.router.known.find(router.public.key_id) is None
        ticket = rig.router.ticket(
            name, prefill=STRANGER, decode=rig.decode_ref, layout=rig.decode, key=router
        )
        async with raw_stream(rig, hello(rig), opening(name, ticket)):
            await until(lambda: transfer.state is TransferState.OPEN)


async def test_a_worker_that_lost_its_task_cannot_fill_the_transfer_of_the_next_one() -> None:
    """Both tickets are genuine. The transfer belongs to the worker that opened it."""
    async with running() as rig:
        transfer = rig.start()
        name = transfer.transfer_id
        await until(lambda: transfer.state is TransferState.OPEN)
        earlier = opening(name, rig.ticket(name, STRANGER))
        async with raw_stream(rig, hello(rig), earlier) as call:
            await call.read()
            assert await refusal(call) == ("PROTOCOL_VIOLATION", "")
            for request in whole_transfer(rig, name):
                await call.write(request)
            await call.write(opening(name, b""))
            assert await refusal(call) == ("UNAUTHENTICATED", "missing")
            assert transfer.state is TransferState.OPEN
            rig.push(name)
            await rig.received(transfer)


async def test_a_stream_with_refused_tickets_only_ends_with_the_claim() -> None:
    async with running() as rig:
        transfer = rig.start()
        await until(lambda: transfer.state is TransferState.OPEN)
        forged = opening(transfer.transfer_id, self_signed(rig, transfer.transfer_id))
        async with raw_stream(rig, hello(rig), *[forged] * 64) as call:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await asyncio.wait_for(read_all(call), PATIENCE_S)
        error = error_from_rpc(raised.value)
        assert isinstance(error, Unauthenticated)
        assert error.metadata["ticket"] == "key_id"
        assert len(rig.router.refused) == 64
        rig.push(transfer.transfer_id)
        await rig.received(transfer)


@pytest.mark.parametrize("prefill,decode", [(1, 1), (4, 2), (2, 4)])
async def test_a_ticket_is_verified_once_for_all_ranks(
    prefill: int, decode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    verified: list[bytes] = []
    has_signed = TicketKey.has_signed

    def counted(self: TicketKey, kind: str, claims: bytes, signature: bytes) -> bool:
        verified.append(claims)
        return has_signed(self, kind, claims, signature)

    monkeypatch.setattr(TicketKey, "has_signed", counted)
    async with running(prefill, decode) as rig:
        for count in (1, 2):
            await rig.received(rig.send())
            assert len(verified) == count
    assert len(set(verified)) == 2


async def test_a_refusal_fails_the_sender_s_task_as_a_failed_transfer() -> None:
    """The task's router gets no UNAUTHENTICATED: its client would take that for its own key."""
    async with running() as rig:
        transfer = rig.reserve()
        name = transfer.transfer_id
        unknown = rig.router.ticket(
            name, prefill=rig.prefill_ref, decode=rig.decode_ref, layout=rig.decode, key=UNKNOWN
        )
        rig.open(replace(rig.target(transfer), ticket=unknown))
        await until(lambda: bool(rig.reports))
        (report,) = rig.reports
        assert report.reason == TransferFailed.reason
        assert "was not signed by a router" in report.detail
        assert transfer.state is TransferState.RESERVED


async def test_a_digest_for_another_handoff_does_not_match(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bytes are the right ones. Their digest has the seed of another ticket."""
    async with running(make_checks=checks("on")) as rig:
        await rig.received(rig.send())
        other = digest_seed(rig.ticket("x" + "6" * 32))
        monkeypatch.setattr(send_transfer, "digest_seed", lambda ticket: other)
        with pytest.raises(KvCorrupt):
            await rig.send().wait()
        await until(lambda: bool(rig.released))
