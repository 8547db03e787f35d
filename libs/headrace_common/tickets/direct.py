"""Direct tickets: a router's signed permission to send one request to one decode worker.

A ticket is bound to the content of the request, to one incarnation of a worker and to one attempt. A worker accepts an
attempt once. A ticket expires, by the clock of its worker. It contains no secret and does not identify its bearer.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable
from typing import Final, TypeAlias

from google.protobuf.message import DecodeError

from headrace.decode.v1 import decode_pb2
from headrace_common.errors import Unauthenticated
from headrace_common.limits import TICKET_BYTES_MAX
from headrace_common.tickets.keys import FindKey, SigningKey, require_signed, unauthenticated

_KIND: Final = decode_pb2.TicketClaims.DESCRIPTOR.full_name

WorkerClock: TypeAlias = Callable[[str, str], int]
"""The wall clock of a worker, by its id and incarnation, in nanoseconds since the Unix epoch."""


def own_clock(worker_id: str, incarnation: str) -> int:
    """This process's wall clock, for a worker that is this process or has the same clock."""
    return time.time_ns()


class TicketSigner:
    """Signs tickets that are valid for `ttl_s`."""

    def __init__(self, key: SigningKey, ttl_s: float, clock: WorkerClock = own_clock) -> None:
        self._key = key
        self._clock = clock
        self.ttl_s = ttl_s

    def sign(self, request: decode_pb2.GenerateRequest, worker_id: str, tenant: str) -> bytes:
        """A ticket for the request, without regard to the ticket in it."""
        claims = decode_pb2.TicketClaims(
            worker_id=worker_id,
            incarnation=request.incarnation,
            transfer_id=request.transfer_id,
            request_hash=_hash_of(request),
            tenant=tenant,
            expire_unix_ns=self._clock(worker_id, request.incarnation) + round(self.ttl_s * 1e9),
        ).SerializeToString()
        return decode_pb2.Ticket(
            claims=claims,
            signature=self._key.sign(_KIND, claims),
            key_id=self._key.public.key_id,
        ).SerializeToString()


def check_ticket(
    find_key: FindKey,
    request: decode_pb2.GenerateRequest,
    worker_id: str | None,
    *,
    late_s: float = 0.0,
    clock: WorkerClock = own_clock,
) -> decode_pb2.TicketClaims:
    """The claims of the request's ticket. Raises Unauthenticated when it is not valid for this request and worker.

    `worker_id` None means any worker. `late_s` extends the lifetime of the ticket. An expired ticket's error has the
    time of `clock` in its metadata, as `unix_ns`.
    """
    claims = require_signed_ticket(find_key, request.ticket)
    now_ns = clock(claims.worker_id, claims.incarnation)
    if now_ns > claims.expire_unix_ns + late_s * 1e9:
        error = unauthenticated("has expired; ask the router for another", "expiry")
        error.add_metadata(unix_ns=str(now_ns))
        raise error
    if worker_id is not None and claims.worker_id != worker_id:
        raise unauthenticated(f"is for {claims.worker_id}, this is {worker_id}", "worker_id")
    if (claims.incarnation, claims.transfer_id) != (request.incarnation, request.transfer_id):
        raise unauthenticated("is for another attempt", "transfer_id")
    if not hmac.compare_digest(claims.request_hash, _hash_of(request)):
        raise unauthenticated(
            "is for another request; send what the router gave, unchanged", "request_hash"
        )
    return claims


def require_signed_ticket(find_key: FindKey, data: bytes) -> decode_pb2.TicketClaims:
    """The claims of a serialized ticket. Raises Unauthenticated unless a known router has signed it."""
    ticket, claims = decode_pb2.Ticket(), decode_pb2.TicketClaims()
    if not data:
        raise Unauthenticated(
            "a ticket is required here; ask a router, by Generate or by Route",
            metadata={"ticket": "missing"},
        )
    try:
        if len(data) > TICKET_BYTES_MAX:
            raise DecodeError("too long")
        ticket.ParseFromString(data)
        claims.ParseFromString(ticket.claims)
    except DecodeError:
        raise unauthenticated("is not a ticket", "signature") from None
    require_signed(
        find_key, _KIND, claims=ticket.claims, signature=ticket.signature, key_id=ticket.key_id
    )
    return claims


def _hash_of(request: decode_pb2.GenerateRequest) -> bytes:
    if request.ticket:
        bare = decode_pb2.GenerateRequest()
        bare.CopyFrom(request)
        bare.ClearField("ticket")
        request = bare
    return hashlib.sha256(request.SerializeToString(deterministic=True)).digest()
