"""Fixtures of the tests of KV transfers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.component.kv.harness import LentMooncake


@pytest.fixture(scope="module")
def mooncake() -> Iterator[LentMooncake]:
    made = LentMooncake()
    yield made
    made.close()
