"""Logs: one line per record on stderr, with its trace."""

from __future__ import annotations

import logging
import sys
import time

from opentelemetry import trace


class LineFormatter(logging.Formatter):
    """UTC time, level, service, worker, module, message, trace and span; newlines as \\n."""

    def __init__(self, service: str, worker_id: str) -> None:
        super().__init__()
        self._origin = f"{service} {worker_id}".strip()

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        message = record.getMessage()
        if record.exc_info:
            message = f"{message}\n{self.formatException(record.exc_info)}"
        if record.stack_info:
            message = f"{message}\n{record.stack_info}"
        moment = f"{seconds}.{int(record.msecs):03d}Z"
        line = f"{moment} {record.levelname} {self._origin} {record.name}: {message}"
        span = trace.get_current_span().get_span_context()
        if span.is_valid:
            line += f" trace={trace.format_trace_id(span.trace_id)}"
            line += f" span={trace.format_span_id(span.span_id)}"
        return line.replace("\r", "\\r").replace("\n", "\\n")


def setup_logging(level: str, service: str, worker_id: str) -> None:
    """Writes the records of `level` ("debug" to "error") and above to stderr only."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(service, worker_id))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # At level debug, gRPC logs every use of the event loop.
    logging.getLogger("grpc").setLevel(max(logging.INFO, root.level))
