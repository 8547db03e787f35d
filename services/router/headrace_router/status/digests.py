"""The last requests and the links between workers, from the stored traces.

A complete trace is read once, however many pages are open.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from headrace.inference.v1 import trace_pb2
from headrace_common.errors import NotFound
from headrace_common.trace_view.model import Link, TraceView
from headrace_common.trace_view.reading import read_trace
from headrace_common.trace_view.verdict import verdict
from headrace_router.tracing.store import TraceStore

REQUESTS_MAX: Final = 50
"""Requests of which a page has the parts."""
SPANS_READ_MAX: Final = 20_000
"""Spans that one call of `read` converts, at most. Older traces come with the next call."""
_LINKS_PER_REQUEST_MAX: Final = 64
TEXT_CHARACTERS_MAX: Final = 200


@dataclass(frozen=True, slots=True)
class RequestDigest:
    """A request without its steps, and its links without their writes."""

    view: TraceView
    verdict: str


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
        self._known: dict[str, RequestDigest] = {}

    def read(self) -> Sequence[RequestDigest]:
        """The newest requests, newest first. Takes milliseconds for each new trace: call it in a thread."""
        summaries, _ = self._store.list_page(REQUESTS_MAX, "")
        found: list[RequestDigest] = []
        spans_read = 0
        for summary in summaries:
            digest = self._known.get(summary.trace_id)
            if (
                digest is None
                or not digest.view.complete
                or digest.view.request_id != summary.request_id
            ):
                if spans_read >= SPANS_READ_MAX:
                    continue
                trace = self._read_one(summary.trace_id)
                if trace is None:
                    continue
                spans_read += len(trace.spans)
                digest = digest_of(read_trace(trace))
            found.append(digest)
        self._known = {digest.view.trace_id: digest for digest in found}
        return found

    def _read_one(self, trace_id: str) -> trace_pb2.Trace | None:
        try:
            return self._store.get(trace_id)
        except NotFound:
            # It was the oldest, and a newer one has its place.
            return None


def digest_of(view: TraceView) -> RequestDigest:
    """A trace in short."""
    links = sorted(view.links, key=lambda link: -link.moving_ns)[:_LINKS_PER_REQUEST_MAX]
    short = tuple(replace(link, writes=()) for link in links)
    return RequestDigest(replace(view, steps=(), links=short), verdict(view)[:TEXT_CHARACTERS_MAX])


def sum_links(digests: Iterable[RequestDigest]) -> list[LinkSum]:
    """The links that the complete ones of these requests used, slowest first. Those of an unknown speed are last."""
    uses: dict[tuple[str, str], list[Link]] = {}
    for digest in digests:
        for link in digest.view.links if digest.view.complete else ():
            uses.setdefault((link.name, link.transport), []).append(link)
    links = [
        LinkSum(
            name=name,
            source=found[0].source,
            destination=found[0].destination,
            transport=transport,
            requests=len(found),
            payload_bytes=sum(link.payload_bytes for link in found),
            busy_ns=sum(link.moving_ns for link in found),
        )
        for (name, transport), found in uses.items()
    ]
    return sorted(links, key=lambda link: (link.busy_ns == 0, link.gb_s, link.name))
