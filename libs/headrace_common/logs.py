"""Logs: one line per record on stderr, as text or as JSON, with its trace."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, TextIO

from opentelemetry import trace

from headrace_common.process.events import LineStore
from headrace_common.tasks import Recent

NAMES_MAX: Final = 8_192
"""Requests and transfers of which the process remembers the trace, for its log."""
_KINDS_MAX: Final = 1_024
MESSAGE_CHARACTERS_MAX: Final = 4_096
"""Characters of a record's message: peers send a part of it."""
_CONTROLS: Final = (
    *(*range(0x09), *range(0x0B, 0x20), *range(0x7F, 0xA0)),
    # They end a line, or change the order of the text after them.
    *(*range(0x200E, 0x2010), *range(0x2028, 0x202F), *range(0x2066, 0x206A)),
)
CONTROL_ESCAPES: Final = {code: f"\\u{code:04x}" for code in _CONTROLS}
"""For str.translate: what stands in place of characters that control a terminal. A newline stays."""
PEER_RECORDS_PER_S: Final = 1.0
PEER_RECORDS_AT_ONCE: Final = 5.0
KIND_RECORDS_PER_S: Final = 20.0
KIND_RECORDS_AT_ONCE: Final = 100.0
_PEER_CHARACTERS_MAX: Final = 128
_TRACEPARENT_PARTS: Final = 4
_GRPC_SERVER_LOGGER: Final = "grpc._cython.cygrpc"
# A private class of gRPC: its name is compared, so that this module needs no private import.
_ENDED_CALL_ERROR: Final = "ExecuteBatchError"
_WRONG_METADATA: Final = "Invalid encoding on %s"


class TraceNames:
    """The traces of the last requests and transfers, by their ids. One thread adds, all may find."""

    def __init__(self) -> None:
        self._spans: Recent[str, trace.SpanContext | str] = Recent(NAMES_MAX)

    def add(self, name: str, span: trace.SpanContext | str) -> None:
        """Lines about this request or transfer belong to the trace of a span, or of a traceparent.

        An empty name, which an invalid message can have, is ignored.
        """
        if name:
            self._spans[name] = span

    def find(self, record: logging.LogRecord) -> tuple[str, str]:
        """The trace id and the span id of a record: of the current span, or of a name among its arguments."""
        context: trace.SpanContext | str = trace.get_current_span().get_span_context()
        if isinstance(context, trace.SpanContext) and not context.is_valid:
            arguments = record.args if isinstance(record.args, tuple) else ()
            names = (one for one in arguments if isinstance(one, str) and one in self._spans)
            context = self._spans.get(next(names, ""), "")
        if isinstance(context, trace.SpanContext):
            if not context.is_valid:
                return "", ""
            return trace.format_trace_id(context.trace_id), trace.format_span_id(context.span_id)
        parts = context.split("-")
        return (parts[1], parts[2]) if len(parts) == _TRACEPARENT_PARTS else ("", "")


TRACE_NAMES: Final = TraceNames()
"""Those of this process."""


def _moment(record: logging.LogRecord) -> str:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03d}Z"


def _message_of(record: logging.LogRecord) -> str:
    message = record.getMessage()
    if len(message) <= MESSAGE_CHARACTERS_MAX:
        return message
    return f"{message[:MESSAGE_CHARACTERS_MAX]}... ({len(message)} characters)"


class BoundedHandler(logging.StreamHandler[TextIO]):
    """Bounds the records of a kind about a peer, which is the first argument, and those of a kind about all peers.

    A kind is a line of this repository that logs. The next record states how many were left out.
    """

    def __init__(self, stream: TextIO, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        super().__init__(stream)
        self._monotonic_s = monotonic_s
        # Since when records may be logged, at the rate of the bound. And the records that were left out.
        self._kinds: Recent[tuple[str, int, str], tuple[float, int]] = Recent(_KINDS_MAX)

    def emit(self, record: logging.LogRecord) -> None:
        """Writes the record, unless it is one too many."""
        repeats = self._repeats_before(record)
        if repeats > 0:
            message = f"{record.getMessage()} ({repeats} more like this before)"
            record = logging.makeLogRecord({**vars(record), "msg": message, "args": ()})
        if repeats >= 0:
            super().emit(record)

    def _repeats_before(self, record: logging.LogRecord) -> int:
        """As _left_out, by peer and kind."""
        if not record.name.startswith("headrace") or record.levelno < logging.INFO:
            return 0
        arguments = record.args if isinstance(record.args, tuple) else ()
        peer = str(arguments[0])[:_PEER_CHARACTERS_MAX] if arguments else ""
        kind = record.pathname, record.lineno
        repeats = self._left_out((*kind, f"peer {peer}"), PEER_RECORDS_PER_S, PEER_RECORDS_AT_ONCE)
        if repeats < 0:
            return -1
        others = self._left_out((*kind, ""), KIND_RECORDS_PER_S, KIND_RECORDS_AT_ONCE)
        return max(repeats, others) if others >= 0 else -1

    def _left_out(self, key: tuple[str, int, str], per_s: float, at_once: float) -> int:
        """The records of a key that were left out before this one. -1 when this one is too many, too."""
        now_s = self._monotonic_s()
        since_s, count = self._kinds.get(key, (0.0, 0))
        since_s = max(since_s, now_s - at_once / per_s)
        fits = since_s + 1 / per_s <= now_s + 1e-6
        self._kinds[key] = (since_s + 1 / per_s, 0) if fits else (since_s, count + 1)
        return count if fits else -1


class LineFormatter(logging.Formatter):
    """UTC time, level, service, worker, module, message, trace and span; newlines as \\n."""

    def __init__(self, service: str, worker_id: str) -> None:
        super().__init__()
        self._origin = f"{service} {worker_id}".strip()

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line."""
        message = _message_of(record)
        if record.exc_info:
            message = f"{message}\n{self.formatException(record.exc_info)}"
        if record.stack_info:
            message = f"{message}\n{record.stack_info}"
        line = f"{_moment(record)} {record.levelname} {self._origin} {record.name}: {message}"
        trace_id, span_id = TRACE_NAMES.find(record)
        if trace_id:
            line += f" trace={trace_id} span={span_id}"
        return line.replace("\r", "\\r").replace("\n", "\\n").translate(CONTROL_ESCAPES)


class JsonFormatter(logging.Formatter):
    """One JSON object a line. `trace_id`, `span_id`, `exception` and `stack` are absent where there are none."""

    def __init__(self, service: str, worker_id: str) -> None:
        super().__init__()
        self._origin: Mapping[str, str] = {"service": service, "worker_id": worker_id}

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line."""
        fields: dict[str, Any] = {
            "time": _moment(record),
            "level": record.levelname,
            **self._origin,
            "logger": record.name,
            "message": _message_of(record),
        }
        trace_id, span_id = TRACE_NAMES.find(record)
        if trace_id:
            fields |= {"trace_id": trace_id, "span_id": span_id}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            fields["stack"] = record.stack_info
        return json.dumps(fields, ensure_ascii=False).translate(CONTROL_ESCAPES)


class EndedCallFilter(logging.Filter):
    """Replaces gRPC's error about a call that its client ended while the server sent to it: level INFO, no traceback.

    Any client can cause it: a deadline that passes while the server sends the status is enough. Other records pass
    unchanged.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """False when another record was logged in place of this one."""
        error = record.exc_info[1] if record.exc_info else None
        if type(error).__name__ != _ENDED_CALL_ERROR:
            return True
        logger = logging.getLogger(record.name)
        logger.info("the client ended its call: %s: %s", record.getMessage(), error)
        return False


class GrpcServerLogger(logging.Logger):
    """Logs no metadata that is no UTF-8: records of a client's thousands of entries would hold the event loop."""

    def exception(self, msg: object, *args: Any, **options: Any) -> None:
        """As Logger does."""
        if msg != _WRONG_METADATA:
            super().exception(msg, *args, **options)


_ENDED_CALLS: Final = EndedCallFilter()


def setup_logging(level: str, service: str, worker_id: str, log_format: str = "text") -> None:
    """Writes the records of `level` ("debug" to "error") and above to stderr only.

    `log_format` is "text" or "json".
    """
    handler = BoundedHandler(sys.stderr)
    formatter = JsonFormatter if log_format == "json" else LineFormatter
    handler.setFormatter(formatter(service, worker_id))
    root = logging.getLogger()
    root.handlers[:] = [handler, LineStore()]
    root.setLevel(level.upper())
    # At level debug, gRPC logs every use of the event loop.
    logging.getLogger("grpc").setLevel(max(logging.INFO, root.level))
    grpc_server = logging.getLogger(_GRPC_SERVER_LOGGER)
    grpc_server.addFilter(_ENDED_CALLS)
    # gRPC made the logger when it was imported.
    grpc_server.__class__ = GrpcServerLogger
