"""Which prefill worker may fill a transfer: the one with the handoff ticket of the router that made the reservation."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TypeAlias

from headrace.kv.v1 import handoff_pb2
from headrace_common.errors import HeadraceError
from headrace_common.tickets import TicketKey, TicketKeys, check_handoff
from headrace_kv.compatibility import layout_hash
from headrace_kv.layout import KvLayout, WorkerRef

_SEED_BYTES = 8


class RouterTickets:
    """Checks the tickets that prefill ranks present to decode worker `decode` with `layout`.

    `keys` are those of its routers. `on_refused` gets the part of each refused ticket.
    """

    def __init__(
        self,
        keys: TicketKeys,
        decode: WorkerRef,
        layout: KvLayout,
        on_refused: Callable[[str], None],
    ) -> None:
        self._keys = keys
        self._on_refused = on_refused
        self._decode = decode
        self._layout_hash = layout_hash(layout)

    def check(
        self, ticket: bytes, transfer_id: str, prefill: WorkerRef, signer: TicketKey | None
    ) -> None:
        """Raises Unauthenticated or PermissionDenied, with the refused part as `ticket` in its metadata.

        `signer` is the only key that counts. None: that of any router that the worker has now.
        """
        required = handoff_pb2.HandoffClaims(
            transfer_id=transfer_id,
            prefill_worker_id=prefill.worker_id,
            prefill_incarnation=prefill.incarnation,
            decode_worker_id=self._decode.worker_id,
            decode_incarnation=self._decode.incarnation,
            layout_hash=self._layout_hash,
        )

        def find(key_id: bytes) -> TicketKey | None:
            if signer is None:
                return self._keys.find(key_id)
            return signer if signer.key_id == key_id else None

        try:
            check_handoff(find, ticket, required)
        except HeadraceError as error:
            self._on_refused(error.metadata["ticket"])
            raise


class NoTickets:
    """Accepts every prefill worker. For pairs of stock vLLM servers, which have no routers."""

    def check(
        self, ticket: bytes, transfer_id: str, prefill: WorkerRef, signer: TicketKey | None
    ) -> None:
        """Raises nothing."""


# RouterTickets.check states the contract.
HandoffTickets: TypeAlias = RouterTickets | NoTickets


def digest_seed(ticket: bytes) -> int:
    """The seed of a transfer's digests: a digest of another handoff does not match. 0 without a ticket."""
    if not ticket:
        return 0
    return int.from_bytes(hashlib.sha256(ticket).digest()[:_SEED_BYTES], "little")
