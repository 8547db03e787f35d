"""Checks of all component tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.span_schema import spans_follow_schema


@pytest.fixture(autouse=True)
def _spans_follow_schema() -> Iterator[None]:
    """Services of this process record only spans, attributes and events of the schema."""
    with spans_follow_schema():
        yield
