"""Handoff tickets: a router's permission for one prefill worker to fill one transfer.

A ticket has no expiry, so no clock matters: the id of its transfer is never used again, and the transfer ends with its
request.
"""

from __future__ import annotations

from typing import Final

from google.protobuf.message import DecodeError

from headrace.kv.v1 import handoff_pb2
from headrace_common.limits import TICKET_BYTES_MAX
from headrace_common.tickets.keys import (
    FindKey,
    SigningKey,
    not_permitted,
    require_signed,
    unauthenticated,
)

_KIND: Final = handoff_pb2.HandoffClaims.DESCRIPTOR.full_name
_CLAIMS: Final = tuple(field.name for field in handoff_pb2.HandoffClaims.DESCRIPTOR.fields)


def sign_handoff(key: SigningKey, claims: handoff_pb2.HandoffClaims) -> bytes:
    """A ticket with these claims."""
    content = claims.SerializeToString()
    return handoff_pb2.HandoffTicket(
        claims=content, signature=key.sign(_KIND, content), key_id=key.public.key_id
    ).SerializeToString()


def check_handoff(find_key: FindKey, ticket: bytes, required: handoff_pb2.HandoffClaims) -> None:
    """Raises Unauthenticated or PermissionDenied, with the wrong part, unless a known router signed these claims.

    The signature is verified last: to refuse a ticket for something else costs little.
    """
    if not ticket:
        raise unauthenticated(
            "is missing; a router gives a handoff ticket with the task", "missing"
        )
    signed, claims = handoff_pb2.HandoffTicket(), handoff_pb2.HandoffClaims()
    try:
        if len(ticket) > TICKET_BYTES_MAX:
            raise DecodeError("too long")
        signed.ParseFromString(ticket)
        claims.ParseFromString(signed.claims)
    except DecodeError:
        raise unauthenticated("is not a handoff ticket", "signature") from None
    for name in _CLAIMS:
        if getattr(claims, name) != getattr(required, name):
            raise not_permitted(f"is for another {name}", name)
    require_signed(
        find_key, _KIND, claims=signed.claims, signature=signed.signature, key_id=signed.key_id
    )
