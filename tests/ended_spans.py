"""The spans that a process has recorded, for tests."""

from __future__ import annotations

from collections.abc import Sequence

from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor

from headrace_common.telemetry.setup import Telemetry


class _Keeping(SpanProcessor):
    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self.spans.append(span)


def ended_spans(telemetry: Telemetry) -> Sequence[ReadableSpan]:
    """A list that grows with each span that ends from now on."""
    keeping = _Keeping()
    telemetry.add_processor(keeping)
    return keeping.spans
