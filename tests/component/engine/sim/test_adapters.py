"""Requests with an adapter have KV and answers of their own, on prefill and on decode."""

from __future__ import annotations

from random import Random

import pytest

from headrace_common.errors import ConfigError, InvalidRequest
from headrace_common.registry.adapters import Adapter
from headrace_engine.interface import Sampling
from headrace_engine.sim.model.settings import parse_settings
from headrace_kv.prefix.cache_salt import adapter_salt
from tests.component.engine.kv_event_workers import random_prompt
from tests.component.engine.sim.support import decode_engine, decode_work, pair

GREEDY = Sampling(temperature=0.0, max_tokens=6)
MODEL = "sim:context=512,adapters=poet/coder:0b"


async def test_answers_with_an_adapter_differ_from_the_models_own() -> None:
    prompt = random_prompt(Random(1), 83)
    async with pair(model=MODEL) as engines:
        adapters = {adapter.name: adapter for adapter in engines.decode.adapters}
        assert set(adapters) == {"poet", "coder"}
        assert adapters["coder"] == Adapter("coder", "0b")
        answers, cached = [], []
        for number, name in enumerate(("poet", "", "coder", "poet")):
            salt = adapter_salt("", adapters.get(name))
            handed = await engines.generate(
                prompt, transfer_id=f"x{number}", cache_salt=salt, adapter=name
            )
            expected = engines.decode.model.expected_tokens(prompt, 6, GREEDY, name)
            assert handed.tokens == expected
            answers.append(handed.tokens)
            cached.append(handed.end.cached_tokens)
    assert len(set(answers[:3])) == 3
    # Only the second request with an adapter finds KV.
    assert cached == [0, 0, 0, 80]


async def test_an_unknown_adapter_is_refused() -> None:
    async with decode_engine(model=MODEL) as engine:
        with pytest.raises(InvalidRequest, match="no adapter 'painter'"):
            await anext(engine.decode(decode_work([1, 2, 3], adapter="painter")))


def test_the_digest_distinguishes_adapters_of_one_name() -> None:
    first, second = (parse_settings(f"sim:adapters=poet{digest}") for digest in ("", ":0a"))
    assert first.adapters[0].name == second.adapters[0].name == "poet"
    assert first.adapters != second.adapters


@pytest.mark.parametrize("text", ["poet/poet", "", "poet:XY"])
def test_wrong_adapters_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="adapters"):
        parse_settings(f"sim:adapters={text}")
