"""The comparison of spans with the schema."""

from __future__ import annotations

from typing import Any

import pytest

from headrace_common.telemetry import schema
from headrace_common.telemetry.spans import EndedSpan
from tests.span_schema import problems_of


@pytest.mark.parametrize(
    "name, attributes, events, problems",
    [
        (schema.SPAN_QUEUE, {schema.ATTRIBUTE_QUEUE_DEPTH: 3}, (), 0),
        (schema.SPAN_QUEUE, {schema.ATTRIBUTE_QUEUE_DEPTH: "3"}, (), 1),
        (schema.SPAN_QUEUE, {schema.ATTRIBUTE_LAYER: 3}, (), 1),
        ("a test's own", {schema.ATTRIBUTE_LAYER: 3}, (), 0),
        (schema.SPAN_TRANSFER, {}, ((schema.EVENT_TRANSFER_STATE, 1, {}),), 0),
        (schema.SPAN_TRANSFER, {}, (("other", 1, {}),), 1),
        (schema.SPAN_TRANSFER, {}, ((schema.EVENT_TRANSFER_STATE, 1, {"other": 1}),), 1),
    ],
)
def test_what_the_schema_lacks_is_a_problem(
    name: str, attributes: dict[str, Any], events: tuple[Any, ...], problems: int
) -> None:
    span = EndedSpan(1, 2, 0, name, 3, 4, attributes, "", events)
    assert len(list(problems_of(span))) == problems
