"""The last requests and the links between workers, from the stored traces.

A complete trace is read once, however many pages are open.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from headrace.inference.v1 import trace_pb2
from headrace_common.errors import NotFound
from headrace_common.trace_view.model import TraceView
from headrace_common.trace_view.reading import read_trace
from headrace_common.trace_view.verdict import verdict
from headrace_router.tracing.store import TraceStore

REQUESTS_MAX: Final = 50
"""Requests of which a page has the parts."""
SPANS_READ_MAX: Final = 20_000
"""Spans that one call of `read` converts, at most. Older traces come with the next call."""
_LINKS_PER_REQUEST_MAX: Final = 64
_TEXT_CHARACTERS_MAX: Final = 200


@dataclass(frozen=True, slots=True)
class LinkUse:
    """What one request wrote on one link."""

    name: str
    source: str
    destination: str
    transport: str
    payload_bytes: int
    busy_ns: int


@dataclass(frozen=True, slots=True)
class RequestDigest:
    """One request in short. `parts` has names and nanoseconds, in the order of the request."""

    trace_id: str
    request_id: str
    start_unix_ns: int
    complete: bool
    ttft_ns: int
    total_ns: int
    prompt_tokens: int
    parts: tuple[tuple[str, int], ...]
    links: tuple[LinkUse, ...]
    error: str
    verdict: str = ""


@dataclass(frozen=True, slots=True)
class LinkSum:
    """One link over the last requests."""

    name: str
    source: str
    destination: str
    transport: str
    requests: int
    payload_bytes: int
    busy_ns: int

    @property
    def gb_s(self) -> float:
        """Gigabytes a second while busy; 0 when the time is unknown."""
        return self.payload_bytes / self.busy_ns if self.busy_ns > 0 else 0.0


class TraceDigests:
    """Keeps the digests of the newest traces. Call it from one thread at a time."""

    def __init__(self, store: TraceStore) -> None:
        self._store = store
        self._known: OrderedDict[str, RequestDigest] = OrderedDict()

    def read(self) -> Sequence[RequestDigest]:
        """The newest requests, newest first. Takes milliseconds for each new trace: call it in a thread."""
        summaries, _ = self._store.list_page(REQUESTS_MAX, "")
        found: list[RequestDigest] = []
        spans_read = 0
        for summary in summaries:
            digest = self._known.get(summary.trace_id)
            fresh = digest is not None and digest.complete
            if not (fresh and digest is not None and digest.request_id == summary.request_id):
                if spans_read >= SPANS_READ_MAX:
                    continue
                trace = self._read_one(summary.trace_id)
                if trace is None:
                    continue
                spans_read += len(trace.spans)
                digest = digest_of(read_trace(trace))
            found.append(digest)
        self._known = OrderedDict((digest.trace_id, digest) for digest in found)
        return found

    def _read_one(self, trace_id: str) -> trace_pb2.Trace | None:
        try:
            return self._store.get(trace_id)
        except NotFound:
            # It was the oldest, and a newer one has its place.
            return None


def digest_of(view: TraceView) -> RequestDigest:
    """A trace in short."""
    uses = [
        LinkUse(
            name=link.name,
            source=link.source,
            destination=link.destination,
            transport=link.transport,
            payload_bytes=link.payload_bytes,
            busy_ns=link.moving_ns,
        )
        for link in view.links
    ]
    uses.sort(key=lambda use: -use.busy_ns)
    return RequestDigest(
        trace_id=view.trace_id,
        request_id=view.request_id,
        start_unix_ns=view.start_unix_ns,
        complete=view.complete,
        ttft_ns=view.ttft_ns if view.answered else 0,
        total_ns=view.total_ns,
        prompt_tokens=view.prompt_tokens,
        parts=tuple((part.name, part.duration_ns) for part in view.parts),
        links=tuple(uses[:_LINKS_PER_REQUEST_MAX]),
        error=view.error[:_TEXT_CHARACTERS_MAX],
        verdict=verdict(view)[:_TEXT_CHARACTERS_MAX],
    )


def sum_links(digests: Iterable[RequestDigest]) -> list[LinkSum]:
    """The links that the complete ones of these requests used, slowest first. Those of an unknown speed are last."""
    uses: dict[tuple[str, str], list[LinkUse]] = {}
    for digest in filter(lambda one: one.complete, digests):
        for use in digest.links:
            uses.setdefault((use.name, use.transport), []).append(use)
    links = [
        LinkSum(
            name=name,
            source=found[0].source,
            destination=found[0].destination,
            transport=transport,
            requests=len(found),
            payload_bytes=sum(use.payload_bytes for use in found),
            busy_ns=sum(use.busy_ns for use in found),
        )
        for (name, transport), found in uses.items()
    ]
    return sorted(links, key=lambda link: (link.busy_ns == 0, link.gb_s, link.name))
