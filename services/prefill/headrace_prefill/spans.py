"""A prefill worker's spans in a request's trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from opentelemetry.trace import Span, Status, StatusCode

from headrace.engine.v1.link_pb2 import SentLink
from headrace.prefill.v1 import prefill_pb2
from headrace_common.errors import HeadraceError
from headrace_common.rpc.trace_context import context_from_traceparent
from headrace_common.tasks import Recent
from headrace_common.telemetry import schema
from headrace_common.telemetry.layer_stamps import LastWrite, last_write
from headrace_common.telemetry.setup import Telemetry
from headrace_engine.interface import PrefillOutcome
from headrace_engine.worker.metrics import tier_attributes
from headrace_kv.layout import WorkerRef
from headrace_kv.messages import SendReport
from headrace_prefill.prefix_fetch import FetchRecord

_LINKS_MAX: Final = 1_024
# A shorter transfer measures delays rather than bandwidth.
_BYTES_MIN: Final = 256 * 1024
_EFFICIENCY: Final = 0.9
"""Share of a link's bandwidth that one transfer is expected to reach."""


class LinkBandwidths:
    """The best rate of this worker's links to each host by each transport."""

    def __init__(self) -> None:
        self._best: Recent[tuple[str, str], float] = Recent(_LINKS_MAX)

    def compare(self, link: SentLink, gb_per_s: float) -> float | None:
        """Counts a link with its rate. Returns the bandwidth in Gbit/s; None when unknown."""
        key = link.destination_host, link.transport
        best = self._best.get(key, 0.0)
        if link.payload_bytes >= _BYTES_MIN:
            best = max(best, gb_per_s)
        if best:
            self._best[key] = best
        return 8 * best if best else None


Attributes: TypeAlias = dict[str, str | int | float]


@dataclass(frozen=True, slots=True)
class EndedTask:
    """A task that has ended, with what the ranks report about its transfer. `outcome` is None after an error."""

    task: prefill_pb2.PrefillTask
    outcome: PrefillOutcome | None
    reports: Sequence[SendReport]
    error: HeadraceError | None
    start_unix_ns: int
    end_unix_ns: int
    fetch: FetchRecord | None = None


class TaskSpans:
    """Records the spans of a worker's tasks."""

    def __init__(self, telemetry: Telemetry, ref: WorkerRef) -> None:
        self._telemetry = telemetry
        self._ref = ref
        self._bandwidths = LinkBandwidths()

    def record(self, ended: EndedTask) -> None:
        """Records the spans of a task, of its computation, and of every link of its transfer."""
        task, outcome, reports, error = ended.task, ended.outcome, ended.reports, ended.error
        span = self._telemetry.start_span(
            schema.SPAN_PREFILL,
            context_from_traceparent(task.traceparent),
            start_unix_ns=ended.start_unix_ns,
            attributes={
                schema.ATTRIBUTE_REQUEST_ID: task.request_id,
                schema.ATTRIBUTE_TRANSFER_ID: task.transfer_id,
                schema.ATTRIBUTE_PREFILL_WORKER_ID: self._ref.worker_id,
                schema.ATTRIBUTE_INCARNATION: self._ref.incarnation,
                schema.ATTRIBUTE_PROMPT_TOKENS: len(task.token_ids),
                schema.ATTRIBUTE_START_TOKEN: task.start_token,
            },
        )
        if not span.is_recording():
            return
        if reports:
            sent_bytes = sum(report.payload_bytes for report in reports)
            span.set_attribute(schema.ATTRIBUTE_PAYLOAD_BYTES, sent_bytes)
            control_bytes = sum(report.control_bytes for report in reports)
            span.set_attribute(schema.ATTRIBUTE_CONTROL_BYTES, control_bytes)
            span.set_attributes(self._record_links(span, ended))
        if ended.fetch is not None:
            _record_fetch(self._telemetry, span, ended.fetch)
        if outcome is not None:
            span.set_attribute(schema.ATTRIBUTE_CACHED_TOKENS, outcome.cached_tokens)
            span.set_attributes(tier_attributes(outcome.tier_tokens))
            self._telemetry.record_span(
                schema.SPAN_PREFILL_COMPUTE,
                span,
                outcome.compute_start_unix_ns,
                outcome.compute_end_unix_ns,
                {
                    schema.ATTRIBUTE_TOKENS: len(task.token_ids)
                    - outcome.cached_tokens
                    - outcome.fetched_tokens,
                    schema.ATTRIBUTE_CACHED_TOKENS: outcome.cached_tokens,
                },
            )
        if error is not None:
            span.set_attribute(schema.ATTRIBUTE_ERROR_REASON, error.reason)
            span.set_status(Status(StatusCode.ERROR, error.detail))
        span.end(ended.end_unix_ns)

    def _record_links(self, parent: Span, ended: EndedTask) -> Attributes:
        """The attributes of the task's span about the whole transfer; none without links.

        The links that a failure has interrupted have it too.
        """
        error = "" if ended.error is None else ended.error.detail
        decode_worker_id = ended.task.decode_worker_id
        found: list[tuple[bool, int, str, LastWrite]] = []
        for report in ended.reports:
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
                name = f"{self._ref.worker_id}/r{report.rank} -> {decode_worker_id}/r{link.destination_rank}"
                found.append((unfinished, link.landed_unix_ns, name, write))
        if not found:
            return {}
        # A link with a write that has not landed ended last.
        *_, name, write = max(found, key=lambda one: one[:2])
        links = [link for report in ended.reports for link in report.links]
        landed_ns = max(link.landed_unix_ns for link in links)
        ready_ns = max(link.ready_unix_ns for link in links)
        start_ns = min(link.start_unix_ns for link in links)
        return {
            schema.ATTRIBUTE_TRANSFER_MS: (landed_ns - start_ns) / 1e6,
            # From the last layer being ready to the last landing: computing did not hide it.
            schema.ATTRIBUTE_EXPOSED_MS: max(0, landed_ns - ready_ns) / 1e6,
            schema.ATTRIBUTE_LAST_LINK: name,
            schema.ATTRIBUTE_LAST_LAYER: write.layer,
            schema.ATTRIBUTE_LAST_CAUSE: write.cause,
            schema.ATTRIBUTE_LAST_CAUSE_MS: write.cause_ns / 1e6,
        }

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
                expected_s = link.payload_bytes * 8 / (gbit_per_s * 1e9 * _EFFICIENCY)
                attributes[schema.ATTRIBUTE_BANDWIDTH_GBIT_PER_S] = gbit_per_s
                attributes[schema.ATTRIBUTE_EXPECTED_MS] = 1e3 * expected_s
                attributes[schema.ATTRIBUTE_BANDWIDTH_SHARE] = 8 * gb_per_s / gbit_per_s
        return attributes


def _record_fetch(telemetry: Telemetry, parent: Span, fetch: FetchRecord) -> None:
    attributes: dict[str, str | int] = {
        schema.ATTRIBUTE_TOKENS: fetch.token_count,
        schema.ATTRIBUTE_PAYLOAD_BYTES: fetch.payload_bytes,
    }
    if fetch.reason:
        attributes[schema.ATTRIBUTE_ERROR_REASON] = fetch.reason
    times = (fetch.start_unix_ns, fetch.end_unix_ns)
    telemetry.record_span(schema.SPAN_PREFIX_FETCH, parent, *times, attributes)


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
