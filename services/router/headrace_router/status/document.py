"""The JSON document of the status page, with a bound on each list. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any, Final

from headrace.inference.v1 import trace_pb2
from headrace_common.errors import NotFound
from headrace_common.trace_view.model import Link, TraceView
from headrace_common.trace_view.reading import read_trace
from headrace_common.trace_view.verdict import SLOW_LINK, verdict
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


def sum_links(digests: Iterable[RequestDigest]) -> list[Link]:
    """The links that the complete ones of these requests used, slowest first. Those of an unknown speed are last."""
    uses: dict[tuple[str, str], list[Link]] = {}
    for digest in digests:
        for link in digest.view.links if digest.view.complete else ():
            uses.setdefault((link.name, link.transport), []).append(link)
    links = [
        replace(
            found[0],
            requests=len(found),
            payload_bytes=sum(link.payload_bytes for link in found),
            moving_ns=sum(link.moving_ns for link in found),
        )
        for found in uses.values()
    ]
    return sorted(links, key=lambda link: (link.moving_ns == 0, link.gb_s, link.name))


WORKERS_MAX: Final = 1_000
"""Workers that the document lists. The totals count all of them."""
LINKS_MAX: Final = 64
"""Links that the document lists, slowest first."""
NAME_CHARACTERS_MAX: Final = 128
SLOW_BYTES_MIN: Final = 16_000_000
"""Bytes before a link can count as slow: of fewer, a hand-over's fixed times are the larger part."""

READY: Final = "ready"
DRAINING: Final = "draining"
UNREACHABLE: Final = "unreachable"
STALLED: Final = "stalled"
SILENT: Final = "no status"


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """One member. `load` is from 0 to 1: the part of its capacity that is in use."""

    role: str
    id: str
    endpoint: str
    model: str
    state: str
    requests: int = 0
    max_requests: int = 0
    held_tokens: int = 0
    total_tokens: int = 0

    @property
    def load(self) -> float:
        """The larger of the parts of its requests and of its KV blocks that are in use."""
        requests = self.requests / self.max_requests if self.max_requests else 0.0
        tokens = self.held_tokens / self.total_tokens if self.total_tokens else 0.0
        return min(1.0, max(requests, tokens))


@dataclass(frozen=True, slots=True)
class DeploymentState:
    """What the router knows at one moment. Seconds and counts; infinite seconds mean "full"."""

    unix_ns: int
    router_id: str
    version: str
    workers: Sequence[WorkerRow]
    queue: Mapping[str, float]
    admission: Mapping[str, float]
    policy: Mapping[str, Any]
    requests: Sequence[RequestDigest]
    links: Sequence[Link]
    traffic: Mapping[str, Any]
    """As headrace_router.status.traffic has it."""


def status_document(state: DeploymentState) -> dict[str, Any]:
    """The document: at most WORKERS_MAX workers, LINKS_MAX links and the given requests."""
    busiest = sorted(state.workers, key=_importance)
    listed = sorted(busiest[:WORKERS_MAX], key=lambda row: (row.role, row.id))
    speeds = [link.gb_s for link in state.links if link.moving_ns > 0]
    median_gb_s = median(speeds) if speeds else 0.0
    return {
        "schema": "headrace.status.v1",
        "unix_ms": state.unix_ns // 1_000_000,
        "router": state.router_id,
        "version": state.version,
        "totals": _totals(state.workers),
        "workers": [_worker(row) for row in listed],
        "workers_left_out": len(state.workers) - len(listed),
        "queue": _finite(state.queue),
        "admission": _finite(state.admission),
        "links": [_link(link, median_gb_s) for link in state.links[:LINKS_MAX]],
        "links_left_out": max(0, len(state.links) - LINKS_MAX),
        "links_median_gb_s": _rounded(median_gb_s) if speeds else None,
        "requests": [_request(digest) for digest in state.requests],
        "policy": state.policy,
        "traffic": state.traffic,
    }


def _importance(row: WorkerRow) -> tuple[bool, float, str]:
    return row.state == READY, -row.load, row.id


def _totals(workers: Sequence[WorkerRow]) -> dict[str, dict[str, int]]:
    totals: dict[str, dict[str, int]] = {}
    for row in workers:
        of_role = totals.setdefault(
            row.role,
            dict.fromkeys(
                ("members", READY, "requests", "max_requests", "held_tokens", "total_tokens"), 0
            ),
        )
        of_role["members"] += 1
        of_role[READY] += row.state == READY
        for name in ("requests", "max_requests", "held_tokens", "total_tokens"):
            of_role[name] += getattr(row, name)
    return totals


def _worker(row: WorkerRow) -> dict[str, Any]:
    return asdict(row) | {
        "endpoint": row.endpoint[:NAME_CHARACTERS_MAX],
        "model": row.model[:NAME_CHARACTERS_MAX],
        "load": round(row.load, 3),
    }


def _link(link: Link, median_gb_s: float) -> dict[str, Any]:
    is_slow = 0 < link.gb_s < SLOW_LINK * median_gb_s and link.moving_ns > 0
    return {
        "name": link.name,
        "source": link.source,
        "destination": link.destination,
        "transport": link.transport,
        "requests": link.requests,
        "payload_bytes": link.payload_bytes,
        "busy_ms": _ms(link.moving_ns),
        "gb_s": _rounded(link.gb_s) if link.moving_ns > 0 else None,
        "slow": is_slow and link.payload_bytes >= SLOW_BYTES_MIN,
    }


def _request(digest: RequestDigest) -> dict[str, Any]:
    view = digest.view
    return {
        "trace_id": view.trace_id,
        "request_id": view.request_id[:NAME_CHARACTERS_MAX],
        "unix_ms": view.start_unix_ns // 1_000_000,
        "complete": view.complete,
        "ttft_ms": _ms(view.ttft_ns if view.answered else 0),
        "total_ms": _ms(view.total_ns),
        "prompt_tokens": view.prompt_tokens,
        "parts": [[name, _ms(part_ns)] for name, part_ns in view.parts.items()],
        "error": view.error[:TEXT_CHARACTERS_MAX],
        "verdict": digest.verdict,
    }


def _finite(values: Mapping[str, float]) -> dict[str, float | None]:
    """JSON has no infinity."""
    return {name: round(one, 4) if math.isfinite(one) else None for name, one in values.items()}


def _ms(nanoseconds: int) -> float:
    return round(nanoseconds / 1e6, 3)


def _rounded(speed: float) -> float:
    """Three digits, also of a slow link."""
    return float(f"{speed:.3g}")
