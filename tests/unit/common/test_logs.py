"""Log lines."""

from __future__ import annotations

import logging
import re
import sys

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from headrace_common.logs import LineFormatter


def record_of(message: str, *, failed: bool = False) -> logging.LogRecord:
    information = sys.exc_info() if failed else None
    return logging.LogRecord("kiln", logging.WARNING, "kiln.py", 1, message, (), information)


def test_a_record_is_one_line_with_its_origin() -> None:
    line = LineFormatter("headrace-kiln", "kiln-0").format(record_of("first\nsecond"))
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z WARNING headrace-kiln kiln-0 kiln: first\\nsecond",
        line,
    )


def test_a_traceback_stays_on_the_line() -> None:
    try:
        raise ValueError("cold")
    except ValueError:
        line = LineFormatter("headrace-kiln", "").format(record_of("failed", failed=True))
    assert "\n" not in line
    assert line.endswith("ValueError: cold")


def test_a_record_inside_a_span_carries_its_ids() -> None:
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("test")
    with tracer.start_as_current_span("firing") as span:
        line = LineFormatter("headrace-kiln", "kiln-0").format(record_of("hot"))
    ids = span.get_span_context()
    assert line.endswith(
        f"trace={trace.format_trace_id(ids.trace_id)} span={trace.format_span_id(ids.span_id)}"
    )
