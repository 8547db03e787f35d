"""The packed times of a link's layer writes."""

from __future__ import annotations

import base64
from array import array

import pytest

from headrace_common.telemetry.layer_stamps import (
    NEVER,
    WRITES_MAX,
    Cause,
    pack_writes,
    unpack_writes,
)

# ready 50 us, then 10 lease, 20 window, 5 queue, 7 staging, 30 gather, 400 move, 3 until the acknowledgement.
WRITE = (9, 0, 64, 4096, 50, 10, 20, 35, 7, 30, 400, 3)
NAMES = (
    *("layer", "start_token", "end_token", "payload_bytes"),
    *("ready", "lease", "window", "wait", "staging", "gather", "move", "acknowledge"),
)


def packed(*writes: tuple[int, ...]) -> str:
    return pack_writes(array("I", [word for write in writes for word in write]))


def changed(**values: int) -> tuple[int, ...]:
    return tuple(values.get(name, word) for name, word in zip(NAMES, WRITE, strict=True))


@pytest.mark.parametrize(
    "write,previous_landed_us,expected",
    [
        (WRITE, 50, ("move", 400_000)),
        (changed(gather=900), 50, ("gather", 900_000)),
        (changed(wait=935, window=920), 50, ("window", 920_000)),
        (changed(wait=935, lease=910), 50, ("lease", 910_000)),
        (changed(wait=935), 50, ("queue", 905_000)),
        (changed(staging=800), 50, ("staging_slot", 800_000)),
        (changed(ready=2_050), 50, ("compute", 2_000_000)),
        (changed(ready=2_050), 2_040, ("move", 400_000)),
        # The wait for earlier writes is theirs.
        (changed(acknowledge=5_000), 50, ("move", 400_000)),
        (changed(move=NEVER), 50, ("unfinished", 75_000)),
    ],
)
def test_the_cause_is_the_longest_part(
    write: tuple[int, ...], previous_landed_us: int, expected: tuple[Cause, int]
) -> None:
    before = (8, *WRITE[1:4], previous_landed_us, *(0,) * 7)
    stamps = unpack_writes(packed(before, write), start_ns=7)[-1]
    assert (stamps.cause, stamps.cause_ns) == expected
    assert stamps.ready_ns == 7 + 1_000 * write[4]


def test_the_last_writes_are_kept() -> None:
    text = packed(*(changed(layer=number) for number in range(WRITES_MAX + 3)))
    assert [write.layer for write in unpack_writes(text)] == list(range(3, WRITES_MAX + 3))
    # The router's bound on one span.
    assert len(text) < 40_000


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no base64!",
        "QUI=",
        base64.b64encode(array("I", (2, *WRITE)).tobytes()).decode(),
        base64.b64encode(array("I", (1, *WRITE, 7)).tobytes()).decode(),
        "é",
    ],
)
def test_a_text_that_is_none_has_no_writes(text: str) -> None:
    assert unpack_writes(text) == ()
