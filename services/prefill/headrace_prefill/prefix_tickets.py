"""The tickets with which decode workers may send prefixes to this worker."""

from __future__ import annotations

import hmac
from collections.abc import Callable

from headrace_common.errors import HeadraceError
from headrace_common.tickets import TicketKey, not_permitted, unauthenticated
from headrace_kv.layout.layout import WorkerRef


class PrefixTickets:
    """Accepts the very ticket that this worker has presented to a decode worker, from that decode worker.

    A router has signed it for this prefill worker, this decode worker and this transfer, and the decode worker verifies
    that. `on_refused` gets the part of each refused ticket.
    """

    def __init__(self, on_refused: Callable[[str], None]) -> None:
        self._on_refused = on_refused
        self._expected: dict[str, tuple[WorkerRef, bytes]] = {}

    def expect(self, transfer_id: str, decode: WorkerRef, ticket: bytes) -> None:
        """From now on, `decode` may send under this id."""
        self._expected[transfer_id] = (decode, ticket)

    def forget(self, transfer_id: str) -> None:
        """From now on, no worker may."""
        self._expected.pop(transfer_id, None)

    def check(
        self, ticket: bytes, transfer_id: str, prefill: WorkerRef, signer: TicketKey | None
    ) -> None:
        """See HandoffTickets. `prefill` is the worker that sends, here a decode worker."""
        try:
            self._check(ticket, transfer_id, prefill)
        except HeadraceError as error:
            self._on_refused(error.metadata["ticket"])
            raise

    def _check(self, ticket: bytes, transfer_id: str, sender: WorkerRef) -> None:
        if not ticket:
            raise unauthenticated("is missing; present the one of SendPrefix", "missing")
        if transfer_id not in self._expected:
            raise not_permitted("is for another transfer_id", "transfer_id")
        decode, expected = self._expected[transfer_id]
        if sender != decode:
            raise not_permitted("is for another decode_worker_id", "decode_worker_id")
        if not hmac.compare_digest(ticket, expected):
            raise unauthenticated("is not the one of SendPrefix", "signature")
