"""The state of one outgoing transfer, event by event."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headrace_common.errors import ProtocolViolation
from headrace_kv.messages import Reservation
from headrace_kv.send.layer_write import WritePlan
from headrace_kv.send.transfer import OutgoingTransfer
from headrace_kv.transport.base import WriteResult
from tests.unit.kv.send.support import BLOCK_TOKENS, LAYOUT, make_range, make_transfer, make_write

TOKENS = 2 * BLOCK_TOKENS
RESERVATION = Reservation("a", (0, 1), 0, TOKENS)
LANDED = WriteResult("in_memory", "direct", 1)


def sending(*, with_hidden_state: bool = False) -> OutgoingTransfer:
    """A transfer of two layers that has its reservation."""
    transfer = make_transfer("a", with_hidden_state=with_hidden_state)
    transfer.planned(WritePlan("a", 0, LAYOUT, LAYOUT))
    transfer.open_sent(1.0)
    transfer.reservation_received(RESERVATION)
    return transfer


def land(transfer: OutgoingTransfer, layer: int) -> None:
    """Plans, writes and acknowledges one whole layer."""
    (_,) = transfer.claim(make_range("a", layer, TOKENS))
    write = make_write("a", layer, TOKENS)
    transfer.write_planned(write)
    write.start_batch()
    write.batch_landed(LANDED, 0)
    assert transfer.next_landed() is write


async def test_timeout_errors_name_the_awaited_event() -> None:
    transfer = make_transfer("a", with_hidden_state=True)
    named = [transfer.timeout_error().detail]
    transfer.planned(WritePlan("a", 0, LAYOUT, LAYOUT))
    transfer.open_sent(1.0)
    named.append(transfer.timeout_error().detail)
    transfer.reservation_received(RESERVATION)
    named.append(transfer.timeout_error().detail)
    land(transfer, 1)
    named.append(transfer.timeout_error().detail)
    land(transfer, 0)
    named.append(transfer.timeout_error().detail)
    assert [detail.partition("while waiting for ")[2] for detail in named] == [
        "the handshake with a@1",
        "the reservation of a@1",
        "layers 0, 1 (2 of 2)",
        "layers 0 (1 of 2)",
        "the hidden state",
    ]


async def test_it_is_complete_when_every_layer_landed_and_the_hidden_state_is_sent() -> None:
    transfer = sending(with_hidden_state=True)
    complete = [transfer.complete]
    for layer in range(2):
        land(transfer, layer)
        complete.append(transfer.complete)
    assert transfer.hidden_state is not None
    assert not list(transfer.hidden_state.take_messages())
    transfer.hidden_state.supply(b"state")
    (message,) = transfer.hidden_state.take_messages()
    assert message.hidden_state.data == b"state"
    assert not list(transfer.hidden_state.take_messages())
    assert [*complete, transfer.complete] == [False, False, False, True]
    assert transfer.payload_bytes == 200
    assert [sent.layer for sent in transfer.report().layers] == [0, 1]


async def test_open_is_sent_again_until_it_is_answered() -> None:
    transfer = make_transfer("a")
    assert not transfer.must_ask_again(5.0)
    transfer.planned(WritePlan("a", 0, LAYOUT, LAYOUT))
    transfer.open_sent(1.0)
    assert not transfer.must_ask_again(0.9)
    assert transfer.must_ask_again(1.0)
    with pytest.raises(ProtocolViolation):
        transfer.reservation_received(Reservation("a", (0,), 0, TOKENS))
    assert transfer.awaits_reservation
    transfer.reservation_received(RESERVATION)
    assert not transfer.must_ask_again(5.0)


@pytest.mark.parametrize("end", [OutgoingTransfer.commit_sent, OutgoingTransfer.stream_lost])
async def test_decode_waits_from_open_to_the_end(end: Callable[[OutgoingTransfer], None]) -> None:
    transfer = make_transfer("a")
    waits = [transfer.decode_waits]
    for event in (lambda t: t.open_sent(1.0), lambda t: t.stop("CANCELLED", ""), end):
        event(transfer)
        waits.append(transfer.decode_waits)
    assert waits == [False, True, True, False]
