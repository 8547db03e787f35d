"""Digests of stored traces: each complete trace is read once."""

from __future__ import annotations

from headrace_common.trace_view.model import Link, TraceView
from headrace_router.status.document import RequestDigest, TraceDigests, sum_links
from headrace_router.tracing.store import TraceLimits, TraceStore
from tests.unit.router.tracing.records import ended


class CountingStore(TraceStore):
    """Counts the traces that are read."""

    reads = 0

    def get(self, name: str):  # type: ignore[no-untyped-def]
        self.reads += 1
        return super().get(name)


def digest(name: str, uses: tuple[Link, ...], complete: bool = True) -> RequestDigest:
    view = TraceView(name, name, 0, complete, ttft_ns=1, total_ns=1, parts={}, links=uses, steps=())
    return RequestDigest(view, "")


def use(source: str, size: int, busy_ns: int) -> Link:
    return Link(source, 0, "d", 0, "tcp", "", size, busy_ns)


def test_links_are_summed_over_complete_requests_slowest_first() -> None:
    links = sum_links(
        [
            digest("1", (use("fast", 400, 100), use("slow", 10, 100))),
            digest("2", (use("slow", 30, 100), use("unknown", 5, 0))),
            digest("3", (use("slow", 10**9, 1),), complete=False),
        ]
    )
    assert [(link.source, link.requests, link.gb_s) for link in links] == [
        ("slow", 2, 0.2),
        ("fast", 1, 4.0),
        ("unknown", 1, 0.0),
    ]


def test_a_complete_trace_is_read_once_and_a_new_one_comes_first() -> None:
    store = CountingStore(TraceLimits(4, 10**6, 10**6), lambda reason, count: None)
    digests = TraceDigests(store)
    assert digests.read() == []
    for number in (1, 2):
        store.start_trace(f"{number:032x}", f"request-{number}", 10 * number)
        store.end_request(ended(trace_id=number, request_id=f"request-{number}"))
    assert [one.view.request_id for one in digests.read()] == ["request-2", "request-1"]
    assert [one.view.total_ns for one in digests.read()] == [70, 70]
    assert store.reads == 2
    store.start_trace(f"{3:032x}", "request-3", 30)
    for _ in range(2):
        assert [one.view.complete for one in digests.read()] == [False, True, True]
    # It is read again until it is complete.
    assert store.reads == 4
