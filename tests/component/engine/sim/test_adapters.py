"""Requests with an adapter have KV and answers of their own, on prefill and on decode."""

from __future__ import annotations

import pytest

from headrace_common.errors import ConfigError, InvalidRequest
from headrace_engine.sim.model.settings import parse_settings
from tests.component.engine.sim.support import decode_engine, decode_work

MODEL = "sim:context=512,adapters=poet/coder:0b"


async def test_an_unknown_adapter_is_refused() -> None:
    async with decode_engine(model=MODEL) as engine:
        with pytest.raises(InvalidRequest, match="no adapter 'painter'"):
            await anext(engine.decode(decode_work([1, 2, 3], adapter="painter")))


@pytest.mark.parametrize("text", ["poet/poet", "", "poet:XY"])
def test_wrong_adapters_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="adapters"):
        parse_settings(f"sim:adapters={text}")
