"""The layer writes of one link, packed into one attribute of its span.

A link is a pair of a sending and a receiving rank. The text is base64 of 32-bit unsigned little-endian words: the
version, then WORDS_PER_WRITE words for each write, oldest first. Times are in microseconds. Pure.
"""

from __future__ import annotations

import base64
import sys
from array import array
from dataclasses import dataclass
from operator import add
from typing import Final, Literal

VERSION: Final = 1
WORDS_PER_WRITE: Final = 12
WRITES_MAX: Final = 512
"""Writes in one attribute. Of more, the last ones are kept."""
NEVER: Final = 0xFFFF_FFFF
"""In place of the time of moving: the write had not landed when its transfer ended."""

Cause = Literal[
    "compute",
    "lease",
    "window",
    "queue",
    "staging_slot",
    "gather",
    "move",
    "acknowledge",
    "unfinished",
]
"""What a write's time went to.

"compute": the link was idle until the layer was ready. "lease": the handshake, or decode's reservation. "window": as
many bytes as allowed were in flight to the peer. "queue": the sender's thread had other work. "staging_slot": the
transport had no free slot, here or at the peer. "gather": copies to staging memory. "move": bytes on the way, with the
receiver's scatter. "acknowledge": earlier writes had not landed yet. "unfinished": the write had not landed when its
transfer ended.
"""


@dataclass(frozen=True, slots=True)
class LayerStamps:
    """One write: tokens [start_token, end_token) of one layer. Times are in ns, from where the reader counts.

    ready <= submitted <= gathered <= landed. `ready`: the engine had written the layer. `submitted`: the transport had
    the first bytes. `gathered`: the slots were free and the bytes were in staging memory; equals `submitted` for writes
    that are not staged. A write that had not landed when its transfer ended is not `finished`, and its times stop where
    it stopped.

    `cause` is what most of the time until the write had landed went to, for `cause_ns`. From the landing of the link's
    writes before it until this layer was ready, the link waited for "compute".
    """

    layer: int
    ready_ns: int
    submitted_ns: int
    gathered_ns: int
    landed_ns: int
    payload_bytes: int
    cause: Cause | Literal[""] = ""
    cause_ns: int = 0
    finished: bool = True
    start_token: int = 0
    end_token: int = 0


def pack_writes(words: array[int]) -> str:
    """The attribute's text: `words` are those of the writes, WORDS_PER_WRITE each, of which the last are kept."""
    kept = array("I", (VERSION,))
    kept.extend(words[-WORDS_PER_WRITE * WRITES_MAX :])
    if sys.byteorder == "big":
        kept.byteswap()
    return base64.b64encode(kept.tobytes()).decode("ascii")


def unpack_writes(text: str, start_ns: int = 0) -> tuple[LayerStamps, ...]:
    """The writes in an attribute's text, oldest first. Empty for a text that is none, or of another version.

    `start_ns` is the start of the link's span.
    """
    words = _words_of(text)
    writes: list[LayerStamps] = []
    landed_ns = start_ns
    for start in range(0, len(words), WORDS_PER_WRITE):
        writes.append(_unpack(words[start : start + WORDS_PER_WRITE], start_ns, landed_ns))
        landed_ns = max(landed_ns, writes[-1].landed_ns)
    return tuple(writes)


@dataclass(frozen=True, slots=True)
class LastWrite:
    """The write of a link that landed last, or the first one that had not landed, and what the link did meanwhile."""

    layer: int
    cause: Cause
    cause_ns: int


def last_write(text: str) -> LastWrite | None:
    """The last write of a link, from an attribute's text. None without writes.

    The cause is what the link did for most of the time since the layer was ready. It is "compute" when the link was
    idle for longer before that. A wait for earlier writes of the link counts as what they did.
    """
    words = _words_of(text)
    if not words:
        return None
    columns = [words[number::WORDS_PER_WRITE] for number in range(WORDS_PER_WRITE)]
    layer, ready, lease, window, wait = columns[0], *columns[4:8]
    staging, gather, move, acknowledge = columns[8:]
    if NEVER in move:
        index = move.index(NEVER)
        return LastWrite(layer[index], "unfinished", 1_000 * (wait[index] + acknowledge[index]))
    started = list(map(add, map(add, ready, wait), staging))
    gathered = list(map(add, started, gather)) if any(gather) else started
    landed = list(map(add, gathered, move))
    end = max(landed)
    # Of equal times, the last.
    index = len(landed) - 1 - landed[::-1].index(end)
    start = ready[index]
    parts: dict[Cause, int] = {
        "lease": lease[index],
        "staging_slot": staging[index],
        "gather": _covered(started, gathered, start, end) if any(gather) else 0,
        "move": _covered(gathered, landed, start, end),
    }
    rest = max(0, end - start - sum(parts.values()))
    full = 2 * window[index] >= wait[index] - lease[index]
    parts["window" if full else "queue"] = rest
    del landed[index]
    parts["compute"] = max(0, start - max(landed, default=0))
    cause = max(parts, key=lambda name: parts[name])
    return LastWrite(layer[index], cause, 1_000 * parts[cause])


def _covered(starts: list[int], ends: list[int], low: int, high: int) -> int:
    """How much of [low, high) at least one of the intervals covers. They are about in the order of their ends."""
    covered, reached = 0, low
    for start, end in zip(starts, ends, strict=True):
        if end > reached:
            covered += max(0, min(end, high) - max(start, reached))
            reached = end
    return covered


def _words_of(text: str) -> array[int]:
    """The words without the version. Empty for a text that is none, or of another version."""
    none = array("I")
    try:
        content = base64.b64decode(text, validate=True)
    except ValueError:
        return none
    if len(content) % 4:
        return none
    words = array("I", content)
    if sys.byteorder == "big":
        words.byteswap()
    if not words or words[0] != VERSION or (len(words) - 1) % WORDS_PER_WRITE:
        return none
    return words[1:]


def _unpack(words: array[int], start_ns: int, previous_landed_ns: int) -> LayerStamps:
    layer, start_token, end_token, payload_bytes = words[:4]
    ready, lease, window, wait, staging, gather, move, acknowledge = (
        1_000 * word for word in words[4:]
    )
    ready += start_ns
    gathered = ready + wait + staging + gather
    parts: dict[Cause, int] = {"unfinished": gathered + acknowledge - ready}
    finished = words[10] != NEVER
    if finished:
        parts = {
            "lease": lease,
            "window": window,
            "queue": max(0, wait - lease - window),
            "staging_slot": staging,
            "gather": gather,
            "move": move,
            "compute": max(0, ready - previous_landed_ns),
        }
    cause = max(parts, key=lambda name: parts[name])
    return LayerStamps(
        layer=layer,
        ready_ns=ready,
        submitted_ns=ready + wait,
        gathered_ns=gathered,
        landed_ns=gathered + move if finished else gathered,
        payload_bytes=payload_bytes,
        cause=cause,
        cause_ns=parts[cause],
        finished=finished,
        start_token=start_token,
        end_token=end_token,
    )
