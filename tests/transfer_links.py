"""Links of transfers, as a sender reports them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any, Final

from headrace.engine.v1.link_pb2 import SentLink
from headrace_common.telemetry.layer_stamps import pack_writes

US: Final = 1_000
START_UNIX_NS: Final = 10**18


def packed(*writes: Iterable[int]) -> str:
    """The packed times of writes, each of 12 words, as docs/telemetry-reference.md describes them."""
    return pack_writes(array("I", [word for write in writes for word in write]))


def sent_link(layer_count: int = 4, **changes: Any) -> SentLink:
    """A link of layers with 100 bytes for 3 tokens each. One is ready each 1,000 us, and lands after 2,000 us."""
    writes = [
        (layer, 0, 3, 100, 1_000 * layer, 0, 0, 500, 0, 0, 1_500, 10)
        for layer in range(layer_count)
    ]
    last_us = 1_000 * (layer_count - 1)
    link = SentLink(
        destination_rank=0,
        destination_host="10.0.0.2",
        transport="mooncake/tcp",
        strategy="direct",
        payload_bytes=100 * layer_count,
        run_count=9 * layer_count,
        entry_count=2 * layer_count,
        write_count=layer_count,
        start_unix_ns=START_UNIX_NS,
        submitted_unix_ns=START_UNIX_NS + 500 * US,
        ready_unix_ns=START_UNIX_NS + last_us * US,
        landed_unix_ns=START_UNIX_NS + (last_us + 2_000) * US,
        end_unix_ns=START_UNIX_NS + (last_us + 2_010) * US,
        moving_ns=(last_us + 1_500) * US,
        layers=packed(*writes),
    )
    for name, value in changes.items():
        setattr(link, name, value)
    return link
