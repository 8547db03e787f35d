"""A router, to which each test adds scripted workers."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.component.router.fakes import Rig


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = await Rig().start()
    yield rig
    await rig.close()


@pytest.fixture
async def look_aside_rig() -> AsyncIterator[Rig]:
    """A router that allows look-aside."""
    rig = await Rig(look_aside=True).start()
    yield rig
    await rig.close()
