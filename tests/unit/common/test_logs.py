"""Log lines."""

from __future__ import annotations

import io
import json
import logging
import re
import sys

import pytest
from grpc._cython import cygrpc  # type: ignore[attr-defined]
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from headrace_common.logs import (
    MESSAGE_CHARACTERS_MAX,
    NAMES_MAX,
    TRACE_NAMES,
    BoundedHandler,
    EndedCallFilter,
    GrpcServerLogger,
    JsonFormatter,
    LineFormatter,
    TraceNames,
    setup_logging,
)


def record_of(message: str, *, failed: bool = False) -> logging.LogRecord:
    information = sys.exc_info() if failed else None
    return logging.LogRecord("kiln", logging.WARNING, "kiln.py", 1, message, (), information)


def test_a_record_is_one_line_with_its_origin() -> None:
    line = LineFormatter("headrace-kiln", "kiln-0").format(record_of("first\nsecond"))
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z WARNING headrace-kiln kiln-0 kiln: first\\nsecond",
        line,
    )


def test_a_text_of_a_peer_is_cut_and_controls_no_terminal() -> None:
    attack = "\x1b]0;owned\x07 \x9b2J \u202egnp.exe \x7f" + "x" * 900_000
    line = LineFormatter("headrace-kiln", "").format(record_of(attack))
    fields = LineFormatter, JsonFormatter
    for formatter in fields:
        line = formatter("kiln", "").format(record_of(attack))
        assert line.isprintable()
        assert len(line) < MESSAGE_CHARACTERS_MAX + 500
    assert json.loads(line)["message"].startswith(attack[:1_000])
    assert "900025 characters" in line


def record_about(
    *arguments: object, line: int = 1, name: str = "headrace_kiln"
) -> logging.LogRecord:
    return logging.LogRecord(name, logging.WARNING, "kiln.py", line, "%s: %s", arguments, None)


def test_repeats_are_counted_by_kind_and_peer() -> None:
    now_s, written = 100.0, io.StringIO()
    handler = BoundedHandler(written, lambda: now_s)

    def lines(*records: logging.LogRecord) -> list[str]:
        """What these records add."""
        before = written.tell()
        for record in records:
            handler.handle(record)
        return written.getvalue()[before:].splitlines()

    first = lines(*(record_about("p0", number) for number in range(1_000)))
    assert first == [f"p0: {number}" for number in range(5)]
    # Another peer, another kind, and another library.
    others = (
        record_about("p1", 1),
        record_about("p0", 1, line=2),
        record_about("p0", 1, name="grpc"),
    )
    assert len(lines(*others)) == 3
    now_s += 1.0
    again = [record_about("p0", "again")] * 2
    assert lines(*again) == ["p0: again (995 more like this before)"]
    now_s += 60.0
    # A peer with a new name for each record.
    new = lines(*(record_about(f"task-{number}", 1) for number in range(150_000)))
    assert len(new) == 100


def test_a_traceback_stays_on_the_line() -> None:
    try:
        raise ValueError("cold")
    except ValueError:
        line = LineFormatter("headrace-kiln", "").format(record_of("failed", failed=True))
        fields = json.loads(JsonFormatter("kiln", "").format(record_of("failed", failed=True)))
    assert "\n" not in line
    assert line.endswith("ValueError: cold")
    assert fields["exception"].endswith("ValueError: cold")


def test_a_record_inside_a_span_carries_its_ids() -> None:
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("test")
    with tracer.start_as_current_span("firing") as span:
        line = LineFormatter("headrace-kiln", "kiln-0").format(record_of("hot"))
    ids = span.get_span_context()
    assert line.endswith(
        f"trace={trace.format_trace_id(ids.trace_id)} span={trace.format_span_id(ids.span_id)}"
    )


TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TRACE_ID, SPAN_ID = TRACEPARENT.split("-")[1:3]


def line_about(name: str) -> logging.LogRecord:
    return logging.LogRecord(
        "kiln", logging.INFO, "kiln.py", 1, "%s: attempt %d failed", (name, 2), None
    )


def test_a_line_about_a_known_request_has_its_trace() -> None:
    TRACE_NAMES.add("r-known", TRACEPARENT)
    fields = json.loads(JsonFormatter("kiln", "").format(line_about("r-known")))
    assert (fields["trace_id"], fields["span_id"]) == (TRACE_ID, SPAN_ID)
    text = LineFormatter("kiln", "").format(line_about("r-known"))
    assert text.endswith(f"attempt 2 failed trace={TRACE_ID} span={SPAN_ID}")
    assert "trace_id" not in json.loads(JsonFormatter("kiln", "").format(line_about("r-other")))


def test_the_known_names_are_bounded() -> None:
    names = TraceNames()
    for number in range(NAMES_MAX + 1):
        names.add(f"r{number}", TRACEPARENT)
    names.add("broken", "no traceparent")
    assert names.find(line_about("r0")) == ("", "")
    assert names.find(line_about("r2")) == (TRACE_ID, SPAN_ID)
    assert names.find(line_about("broken")) == ("", "")


def grpc_record(error: Exception) -> logging.LogRecord:
    """As gRPC's server logs an error of a call."""
    information = (type(error), error, None)
    message, arguments = "raised in core by servicer method [%s]", ("/kiln/Fire",)
    return logging.LogRecord(
        "grpc._cython.cygrpc", logging.ERROR, "server.pyx", 1, message, arguments, information
    )


@pytest.mark.parametrize(("level", "shown"), [(logging.INFO, 1), (logging.WARNING, 0)])
def test_a_call_that_its_client_ended_is_no_error(
    level: int, shown: int, caplog: pytest.LogCaptureFixture
) -> None:
    record = grpc_record(cygrpc.ExecuteBatchError("SendStatusFromServerOperation"))
    with caplog.at_level(level, record.name):
        assert not EndedCallFilter().filter(record)
    assert len(caplog.records) == shown
    for replaced in caplog.records:
        line = LineFormatter("headrace-kiln", "kiln-0").format(replaced)
        assert " INFO headrace-kiln kiln-0 grpc._cython.cygrpc: the client ended its call: " in line
        assert "[/kiln/Fire]" in line
        assert line.endswith("SendStatusFromServerOperation")


def test_logging_is_set_up_with_the_rule_for_ended_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    root, grpc_log = logging.getLogger(), logging.getLogger("grpc")
    grpc_server = logging.getLogger("grpc._cython.cygrpc")
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(grpc_server, "filters", [])
    levels = root.level, grpc_log.level
    try:
        for _ in range(2):
            setup_logging("info", "headrace-kiln", "kiln-0")
    finally:
        root.setLevel(levels[0])
        grpc_log.setLevel(levels[1])
    assert [type(one) for one in grpc_server.filters] == [EndedCallFilter]


def test_wrong_metadata_of_a_client_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    log = GrpcServerLogger("grpc._cython.cygrpc")
    log.addHandler(caplog.handler)
    try:
        raise ValueError("no text")
    except ValueError:
        log.exception("Invalid encoding on %s", b"\x81")
        assert not caplog.records
        log.exception("Unexpected error")
    assert [record.exc_info is not None for record in caplog.records] == [True]
