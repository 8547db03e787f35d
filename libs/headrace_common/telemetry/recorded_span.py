"""Spans that the router records about a block of code."""

from __future__ import annotations

import time
from types import TracebackType

from opentelemetry.context import Context
from opentelemetry.trace import Span
from opentelemetry.util.types import AttributeValue

from headrace_common.errors import HeadraceError
from headrace_common.telemetry.setup import Telemetry


class recorded_span:  # noqa: N801 - used like a function
    """Records a span over the block, with the detail of a HeadraceError that the block raises.

    The block may add attributes to the yielded dict. Not a generator, which costs several times as much.
    """

    __slots__ = ("_attributes", "_name", "_parent", "_start_unix_ns", "_telemetry")

    def __init__(self, telemetry: Telemetry, name: str, parent: Context | Span) -> None:
        self._telemetry = telemetry
        self._name = name
        self._parent = parent
        self._attributes: dict[str, AttributeValue] = {}
        self._start_unix_ns = 0

    def __enter__(self) -> dict[str, AttributeValue]:
        self._start_unix_ns = time.time_ns()
        return self._attributes

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        problem = error.detail if isinstance(error, HeadraceError) else ""
        start_ns, end_ns = self._start_unix_ns, time.time_ns()
        self._telemetry.record_span(
            self._name, self._parent, start_ns, end_ns, self._attributes, problem
        )
