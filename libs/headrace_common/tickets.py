"""Handoff tickets: a router's permission for one prefill worker to fill one transfer.

The private key never leaves the process. Others get the public key, so they verify tickets and cannot sign any.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from typing import Final, TypeAlias

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from google.protobuf.message import DecodeError

from headrace.kv.v1 import handoff_pb2
from headrace_common.deadlines import Deadline
from headrace_common.errors import PermissionDenied, QueueFull, Unauthenticated
from headrace_common.limits import (
    TICKET_BYTES_MAX,
    TICKET_KEY_ID_BYTES,
    TICKET_KEY_KEPT_S,
    TICKET_KEYS_MAX,
    TICKET_PUBLIC_KEY_BYTES,
)

FindKey: TypeAlias = Callable[[bytes], "TicketKey | None"]
"""The key with an id, None when it is unknown."""


class TicketKey:
    """A router's public key."""

    def __init__(self, public_key: bytes) -> None:
        """Raises ValueError unless `public_key` has TICKET_PUBLIC_KEY_BYTES bytes."""
        if len(public_key) != TICKET_PUBLIC_KEY_BYTES:
            raise ValueError(f"give {TICKET_PUBLIC_KEY_BYTES} bytes, not {len(public_key)}")
        self._key = Ed25519PublicKey.from_public_bytes(public_key)
        self.public_key = public_key
        self.key_id = hashlib.sha256(public_key).digest()[:TICKET_KEY_ID_BYTES]

    def has_signed(self, kind: str, claims: bytes, signature: bytes) -> bool:
        """Whether the router has signed these claims, as claims of this kind."""
        try:
            self._key.verify(signature, _signed_bytes(kind, claims))
        except InvalidSignature:
            return False
        return True


class SigningKey:
    """A router's key pair. Has no method that returns the private key."""

    def __init__(self) -> None:
        self._key = Ed25519PrivateKey.generate()
        self.public = TicketKey(self._key.public_key().public_bytes_raw())

    def sign(self, kind: str, claims: bytes) -> bytes:
        """The signature of claims. `kind` is their message's full name: no kind of ticket stands for another."""
        return self._key.sign(_signed_bytes(kind, claims))


class TicketKeys:
    """The public keys of routers: those that are in use, and those that were until `kept_s` ago.

    At most TICKET_KEYS_MAX. One event loop owns it.
    """

    def __init__(
        self, kept_s: float = TICKET_KEY_KEPT_S, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._kept_s = kept_s
        self._clock_s = clock_s
        self._keys: dict[bytes, TicketKey] = {}
        self._uses: dict[bytes, int] = {}
        # When the last use ended. Oldest first.
        self._ended_s: dict[bytes, float] = {}
        self._added = asyncio.Event()

    def __len__(self) -> int:
        return len(self._keys)

    def use(self, public_key: bytes) -> KeyUse:
        """Adds a key until the returned use ends. Raises ValueError for bytes that are no key, or QueueFull."""
        key = TicketKey(public_key)
        self._forget_ended()
        if key.key_id not in self._keys:
            self._make_room()
            self._keys[key.key_id] = key
        self._ended_s.pop(key.key_id, None)
        self._uses[key.key_id] = self._uses.get(key.key_id, 0) + 1
        self._added.set()
        return KeyUse(lambda: self._end_use(key.key_id))

    def find(self, key_id: bytes) -> TicketKey | None:
        """The key with this id, None when it is unknown or no longer kept."""
        self._forget_ended()
        return self._keys.get(key_id)

    async def wait_for(self, key_id: bytes, timeout_s: float) -> TicketKey | None:
        """Waits until the key is known. None after `timeout_s`."""
        deadline = Deadline.after(timeout_s)
        while (key := self.find(key_id)) is None and not deadline.expired:
            self._added.clear()
            try:
                async with asyncio.timeout(deadline.remaining_s()):
                    await self._added.wait()
            except TimeoutError:
                break
        return key

    def _end_use(self, key_id: bytes) -> None:
        self._uses[key_id] -= 1
        if not self._uses[key_id]:
            del self._uses[key_id]
            self._ended_s[key_id] = self._clock_s()

    def _forget_ended(self) -> None:
        forget_s = self._clock_s() - self._kept_s
        for key_id, ended_s in tuple(self._ended_s.items()):
            if ended_s > forget_s:
                break
            self._forget(key_id)

    def _make_room(self) -> None:
        if len(self._keys) < TICKET_KEYS_MAX:
            return
        oldest = next(iter(self._ended_s), None)
        if oldest is None:
            raise QueueFull(
                f"{TICKET_KEYS_MAX} ticket keys are in use already",
                metadata={"maxsize": str(TICKET_KEYS_MAX)},
            )
        self._forget(oldest)

    def _forget(self, key_id: bytes) -> None:
        del self._ended_s[key_id]
        del self._keys[key_id]


class KeyUse:
    """One use of a key, such as an open stream of its router."""

    def __init__(self, end: Callable[[], None]) -> None:
        self._end: Callable[[], None] | None = end

    def end(self) -> None:
        """The key stays known for a bounded time. Repeats are ignored."""
        if self._end is not None:
            self._end()
            self._end = None


def unauthenticated(why: str, part: str) -> Unauthenticated:
    """The error of a ticket that no router has signed, or that is not valid any more. `part` is the wrong part."""
    return Unauthenticated(f"the ticket {why}", metadata={"ticket": part})


def not_permitted(why: str, part: str) -> PermissionDenied:
    """The error of a ticket that permits something else. `part` is the claim."""
    return PermissionDenied(f"the ticket {why}", metadata={"ticket": part})


def require_signed(
    find_key: FindKey, kind: str, *, claims: bytes, signature: bytes, key_id: bytes
) -> None:
    """Raises Unauthenticated unless a known router has signed the claims."""
    key = find_key(key_id)
    if key is None:
        raise unauthenticated("was not signed by a router that this process knows", "key_id")
    if not key.has_signed(kind, claims, signature):
        raise unauthenticated("was not signed by its router, or was changed", "signature")


def _signed_bytes(kind: str, claims: bytes) -> bytes:
    return kind.encode() + b"\0" + claims


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
