"""A router with scripted workers."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.component.router.fakes import Rig


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = await Rig().start()
    yield rig
    await rig.close()
