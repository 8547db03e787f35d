"""Only the decode worker that was asked, with the ticket that it got, may send a prefix."""

from __future__ import annotations

import pytest

from headrace_common.errors import HeadraceError, PermissionDenied, Unauthenticated
from headrace_kv.layout.layout import WorkerRef
from headrace_prefill.prefix_tickets import PrefixTickets

DECODE = WorkerRef("decode-0", "00")
TICKET = b"signed by a router"


@pytest.mark.parametrize(
    ("ticket", "name", "sender", "kind", "part"),
    [
        (b"", "x1", DECODE, Unauthenticated, "missing"),
        (b"signed by another", "x1", DECODE, Unauthenticated, "signature"),
        (TICKET, "x2", DECODE, PermissionDenied, "transfer_id"),
        (TICKET, "x1", WorkerRef("decode-0", "01"), PermissionDenied, "decode_worker_id"),
        (TICKET, "x1", WorkerRef("decode-1", "00"), PermissionDenied, "decode_worker_id"),
    ],
)
def test_every_other_ticket_is_refused_and_counted(
    ticket: bytes, name: str, sender: WorkerRef, kind: type[HeadraceError], part: str
) -> None:
    refused: list[str] = []
    tickets = PrefixTickets(refused.append)
    tickets.expect("x1", DECODE, TICKET)
    with pytest.raises(kind) as raised:
        tickets.check(ticket, name, sender, None)
    assert raised.value.metadata["ticket"] == part
    assert refused == [part]
    tickets.check(TICKET, "x1", DECODE, None)
    assert refused == [part]


def test_a_ticket_ends_with_its_fetch() -> None:
    tickets = PrefixTickets(lambda part: None)
    tickets.expect("x1", DECODE, TICKET)
    tickets.forget("x1")
    with pytest.raises(PermissionDenied):
        tickets.check(TICKET, "x1", DECODE, None)
