"""The spans of a task's transfer links."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from opentelemetry.trace import Span, Status, StatusCode

from headrace.engine.v1.link_pb2 import SentLink
from headrace.prefill.v1 import prefill_pb2
from headrace_common.telemetry import schema
from headrace_common.telemetry.layer_stamps import (
    LastWrite,
    last_write,
)
from headrace_common.telemetry.setup import Telemetry
from headrace_kv.layout import WorkerRef
from headrace_kv.messages import SendReport
from headrace_prefill.bandwidths import LinkBandwidths, transfer_s

Attributes: TypeAlias = dict[str, str | int | float]


class LastLink(NamedTuple):
    """The link that ended last. One with a write that has not landed is greater than all others."""

    unfinished: bool
    end_ns: int
    name: str
    write: LastWrite


class LinkSpans:
    """Records a span for each link of a task."""

    def __init__(self, telemetry: Telemetry, ref: WorkerRef, bandwidths: LinkBandwidths) -> None:
        self._telemetry = telemetry
        self._worker_id = ref.worker_id
        self._bandwidths = bandwidths

    def record(
        self, parent: Span, decode_worker_id: str, reports: Sequence[SendReport], error: str = ""
    ) -> Attributes:
        """Records the spans. Returns the attributes of the task's span about the whole transfer; none without links.

        `error` describes the failure of a task that has failed. The links that it interrupted have it too.
        """
        last: LastLink | None = None
        for report in reports:
            for link in report.links:
                write = last_write(link.layers)
                if write is None:
                    continue
                attributes = self._attributes(report, link, write)
                attributes[schema.ATTRIBUTE_DECODE_WORKER_ID] = decode_worker_id
                span = self._telemetry.start_span(
                    schema.SPAN_TRANSFER_LINK,
                    parent,
                    attributes=attributes,
                    start_unix_ns=link.start_unix_ns,
                )
                unfinished = write.cause == "unfinished"
                if unfinished and error:
                    span.set_status(Status(StatusCode.ERROR, error))
                span.end(link.end_unix_ns)
                name = f"{self._worker_id}/r{report.rank} -> {decode_worker_id}/r{link.destination_rank}"
                ended = LastLink(unfinished, link.landed_unix_ns, name, write)
                last = ended if last is None else max(last, ended, key=lambda one: one[:2])
        return _transfer_attributes(reports, last) if last is not None else {}

    def _attributes(self, report: SendReport, link: SentLink, write: LastWrite) -> Attributes:
        attributes: Attributes = {
            schema.ATTRIBUTE_SOURCE_RANK: report.rank,
            schema.ATTRIBUTE_DESTINATION_RANK: link.destination_rank,
            schema.ATTRIBUTE_SOURCE_HOST: report.host,
            schema.ATTRIBUTE_DESTINATION_HOST: link.destination_host,
            schema.ATTRIBUTE_LINK_KIND: report.kind_of(link),
            schema.ATTRIBUTE_LINK_MEMORY: report.memory,
            schema.ATTRIBUTE_TRANSPORT: link.transport,
            schema.ATTRIBUTE_STRATEGY: link.strategy,
            schema.ATTRIBUTE_PAYLOAD_BYTES: link.payload_bytes,
            schema.ATTRIBUTE_RUNS: link.run_count,
            schema.ATTRIBUTE_ENTRIES: link.entry_count,
            schema.ATTRIBUTE_WRITES: link.write_count,
            schema.ATTRIBUTE_MOVING_MS: link.moving_ns / 1e6,
            schema.ATTRIBUTE_LAST_LAYER: write.layer,
            schema.ATTRIBUTE_LAST_CAUSE: write.cause,
            schema.ATTRIBUTE_LAST_CAUSE_MS: write.cause_ns / 1e6,
            schema.ATTRIBUTE_LINK_LAYERS: link.layers,
        }
        if link.moving_ns and link.payload_bytes:
            gb_per_s = link.payload_bytes / link.moving_ns
            attributes[schema.ATTRIBUTE_GIGABYTES_PER_S] = gb_per_s
            gbit_per_s = self._bandwidths.compare(link, gb_per_s)
            if gbit_per_s is not None:
                expected_s = transfer_s(link.payload_bytes, gbit_per_s)
                attributes[schema.ATTRIBUTE_BANDWIDTH_GBIT_PER_S] = gbit_per_s
                attributes[schema.ATTRIBUTE_EXPECTED_MS] = 1e3 * expected_s
                attributes[schema.ATTRIBUTE_BANDWIDTH_SHARE] = 8 * gb_per_s / gbit_per_s
        return attributes


def last_link(reports: Sequence[SendReport], received_unix_ns: int) -> prefill_pb2.SentLink | None:
    """The link that ended last, for a router that gets no spans. None without links."""
    links = ((link.end_unix_ns, report.rank, link) for report in reports for link in report.links)
    found = max(links, default=None, key=lambda one: one[0])
    if found is None:
        return None
    end_unix_ns, rank, link = found
    return prefill_pb2.SentLink(
        source_rank=rank,
        destination_rank=link.destination_rank,
        transport=link.transport,
        strategy=link.strategy,
        payload_bytes=link.payload_bytes,
        moving_us=link.moving_ns // 1_000,
        start_us=max(0, link.start_unix_ns - received_unix_ns) // 1_000,
        end_us=max(0, end_unix_ns - received_unix_ns) // 1_000,
        layers=link.layers,
    )


def exposed_ns(reports: Sequence[SendReport]) -> int:
    """Nanoseconds from the last layer being ready to the landing of the last write: computing did not hide them."""
    links = [link for report in reports for link in report.links]
    last_ready_ns = max((link.ready_unix_ns for link in links), default=0)
    return max(0, max((link.landed_unix_ns for link in links), default=0) - last_ready_ns)


def _transfer_attributes(reports: Sequence[SendReport], last: LastLink) -> Attributes:
    links = [link for report in reports for link in report.links]
    start_ns = min(link.start_unix_ns for link in links)
    landed_ns = max(link.landed_unix_ns for link in links)
    return {
        schema.ATTRIBUTE_TRANSFER_MS: (landed_ns - start_ns) / 1e6,
        schema.ATTRIBUTE_EXPOSED_MS: exposed_ns(reports) / 1e6,
        schema.ATTRIBUTE_LAST_LINK: last.name,
        schema.ATTRIBUTE_LAST_LAYER: last.write.layer,
        schema.ATTRIBUTE_LAST_CAUSE: last.write.cause,
        schema.ATTRIBUTE_LAST_CAUSE_MS: last.write.cause_ns / 1e6,
    }
