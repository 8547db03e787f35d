"""The layer ranges that prefill ranks have sent, as their reports have them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from headrace.engine.v1.link_pb2 import SentLink
from headrace_common.telemetry.layer_stamps import LayerStamps, unpack_writes
from headrace_kv.messages import SendReport


class LayerSent(NamedTuple):
    """One range that has landed."""

    rank: int
    link: SentLink
    times: LayerStamps

    @property
    def ready_unix_ns(self) -> int:
        return self.link.start_unix_ns + self.times.ready_ns


def sent_layers(reports: Iterable[SendReport]) -> list[LayerSent]:
    """The last writes of each link that have landed."""
    links = [(report.rank, link) for report in reports for link in report.links]
    stamps = [(*link, times) for link in links for times in unpack_writes(link[1].layers)]
    return [LayerSent(*one) for one in stamps if one[-1].finished]
