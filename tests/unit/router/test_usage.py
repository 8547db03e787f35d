"""What requests have cost, by hour and tenant."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from headrace.inference.v1 import receipt_pb2
from headrace_common.durations import unix_ns_from_timestamp
from headrace_common.telemetry.metrics.instruments import Counter
from headrace_router.usage import HOUR_NS, HOURS_MAX, LINES_MAX, UsageBook


def book_of(counters: list[Counter]) -> UsageBook:
    def counter(name: str, *labels: str) -> Counter:
        counters.append(Counter(name, labels))
        return counters[-1]

    metrics: Any = SimpleNamespace(store=SimpleNamespace(counter=counter))
    return UsageBook(metrics)


def ended(tenant: str, hour: int) -> Any:
    return SimpleNamespace(
        payer=(tenant, "m", ""),
        receipt=receipt_pb2.Receipt(decode_device_us=2_000_000, attempts=1),
        end_unix_ns=hour * HOUR_NS + 5,
        prompt_tokens=3,
        usage=None,
        attempts=[],
    )


def test_tenants_beyond_the_lines_of_an_hour_share_one() -> None:
    counters: list[Counter] = []
    book = book_of(counters)
    for number in range(LINES_MAX + 2):
        book.add(ended(f"t{number}", 7))
    lines = {line.tenant: line for line in book.since(0)}
    assert len(lines) == LINES_MAX + 1
    assert lines["other"].request_count == 2
    assert lines["other"].receipt.decode_device_us == 4_000_000
    assert counters[0].points()["t0", "m", "decode"] == 2.0


def test_only_the_last_hours_are_kept_and_those_that_end_later_are_read() -> None:
    book = book_of([])
    for hour in range(HOURS_MAX + 3):
        book.add(ended("a", hour))
    hours = [unix_ns_from_timestamp(line.start_time) // HOUR_NS for line in book.since(0)]
    assert hours == list(range(3, HOURS_MAX + 3))
    assert len(list(book.since((HOURS_MAX + 1) * HOUR_NS))) == 2
