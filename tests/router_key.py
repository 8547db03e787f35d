"""A router's ticket key, and a decode worker that has it."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.kv.v1 import handoff_pb2
from headrace_common.tickets import SigningKey, TicketKeys, sign_handoff
from headrace_kv.compatibility import layout_hash
from headrace_kv.layout import KvLayout, WorkerRef
from headrace_kv.tickets import RouterTickets


@dataclass
class RouterKey:
    """`known` are the keys of a decode worker that watches one router, the one with `key`."""

    key: SigningKey = field(default_factory=SigningKey)
    known: TicketKeys = field(default_factory=TicketKeys)
    refused: list[str] = field(default_factory=list)
    """The refused parts, in order."""

    def __post_init__(self) -> None:
        self.known.use(self.key.public.public_key)

    @property
    def key_id(self) -> bytes:
        return self.key.public.key_id

    def tickets(self, decode: WorkerRef, layout: KvLayout) -> RouterTickets:
        """What the decode worker checks handoff tickets with."""
        return RouterTickets(self.known, decode, layout, self.refused.append)

    def ticket(
        self,
        transfer_id: str,
        *,
        prefill: WorkerRef,
        decode: WorkerRef,
        layout: KvLayout,
        key: SigningKey | None = None,
    ) -> bytes:
        """The ticket that the router gives with a task. `key` signs in its place."""
        claims = handoff_pb2.HandoffClaims(
            transfer_id=transfer_id,
            prefill_worker_id=prefill.worker_id,
            prefill_incarnation=prefill.incarnation,
            decode_worker_id=decode.worker_id,
            decode_incarnation=decode.incarnation,
            layout_hash=layout_hash(layout),
        )
        return sign_handoff(key or self.key, claims)
