"""The bandwidth with which the transfers of a worker are compared."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from headrace.engine.v1.link_pb2 import SentLink

_LINKS_MAX: Final = 1_024
# A shorter transfer measures delays rather than bandwidth.
_BYTES_MIN: Final = 256 * 1024
_EFFICIENCY: Final = 0.9
"""Share of a link's bandwidth that one transfer is expected to reach."""


def transfer_s(payload_bytes: int, gbit_per_s: float) -> float:
    """Seconds that the bytes should take over a link of 10^9 * `gbit_per_s` bits per second."""
    return payload_bytes * 8 / (gbit_per_s * 1e9 * _EFFICIENCY)


class LinkBandwidths:
    """The best rate of this worker's links to each host by each transport."""

    def __init__(self) -> None:
        self._best: OrderedDict[tuple[str, str], float] = OrderedDict()

    def compare(self, link: SentLink, gb_per_s: float) -> float | None:
        """Counts a link with its rate. Returns the bandwidth in Gbit/s; None when unknown."""
        key = link.destination_host, link.transport
        best = self._best.get(key, 0.0)
        if link.payload_bytes >= _BYTES_MIN and gb_per_s > best:
            best = self._best[key] = gb_per_s
        if key in self._best:
            self._best.move_to_end(key)
        if len(self._best) > _LINKS_MAX:
            self._best.popitem(last=False)
        return 8 * best if best else None
