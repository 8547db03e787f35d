"""Spans that the router records about a block of code."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry.context import Context
from opentelemetry.trace import Span
from opentelemetry.util.types import AttributeValue

from headrace_common.errors import HeadraceError
from headrace_common.telemetry.setup import Telemetry


@contextmanager
def recorded_span(
    telemetry: Telemetry, name: str, parent: Context | Span
) -> Iterator[dict[str, AttributeValue]]:
    """Records a span over the block, with the detail of a HeadraceError that the block raises.

    The block may add attributes to the yielded dict.
    """
    start_unix_ns = time.time_ns()
    attributes: dict[str, AttributeValue] = {}
    problem = ""
    try:
        yield attributes
    except HeadraceError as error:
        problem = error.detail
        raise
    finally:
        telemetry.record_span(name, parent, start_unix_ns, time.time_ns(), attributes, problem)
