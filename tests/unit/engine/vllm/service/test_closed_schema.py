"""Objects of a JSON Schema get no properties that the schema does not name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace_engine.vllm.service.sampling import closed_schema

CLOSED = {"additionalProperties": False}
NAMED = {"properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    "schema, closed",
    [
        (NAMED, NAMED | CLOSED),
        (NAMED | {"additionalProperties": True}, NAMED | {"additionalProperties": True}),
        ({"type": "object"}, {"type": "object"}),
        ({"items": NAMED, "default": NAMED}, {"items": NAMED | CLOSED, "default": NAMED}),
        ({"anyOf": [NAMED, True]}, {"anyOf": [NAMED | CLOSED, True]}),
        ({"$defs": {"items": NAMED}}, {"$defs": {"items": NAMED | CLOSED}}),
        ({"enum": [{"properties": {}}]}, {"enum": [{"properties": {}}]}),
        ({"allOf": [NAMED, NAMED]}, {"allOf": [NAMED, NAMED]}),
    ],
)
def test_objects_are_closed_unless_the_schema_opens_them(schema: Any, closed: Any) -> None:
    assert json.loads(closed_schema(json.dumps(schema))) == closed
