"""The device of the tests of this folder."""

from __future__ import annotations

import pytest

from tests.devices import DEVICES, require


@pytest.fixture(scope="session", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """A device by its name in torch, which is imported only where a test needs it."""
    require(request.param)
    return str(request.param)
