"""A router, to which each test adds scripted workers."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from headrace_router import service
from tests.kit.router import Rig


@pytest.fixture
async def rig(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    """See `with_settings` for other settings than the defaults."""
    rig = await Rig(**getattr(request, "param", {})).start()
    yield rig
    await rig.close()


@pytest.fixture
def early_router_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends the router's deadline 5 s before the client's, so that its error arrives first on any machine."""
    monkeypatch.setattr(service, "_DEADLINE_MARGIN_S", 5.0)
    monkeypatch.setattr(service, "_DEADLINE_MARGIN_SHARE", 1.0)
