"""Requests with an adapter have KV and answers of their own, on prefill and on decode."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace_common.errors import InvalidRequest
from headrace_common.registry.adapters import Adapter
from headrace_engine.interface import DecodeTokens
from tests.component.engine.sim.support import GREEDY, answer_of, decode_engine, decode_work

MODEL = "sim:context=512,adapters=poet/coder:0b"


async def test_an_unknown_adapter_is_refused() -> None:
    async with decode_engine(model=MODEL) as engine:
        with pytest.raises(InvalidRequest, match="no adapter 'painter'"):
            await anext(engine.decode(decode_work([1, 2, 3], adapter=Adapter("painter", "0a"))))


async def test_a_prompt_has_the_logprobs_of_its_adapter() -> None:
    prompt = list(range(100, 120))
    async with decode_engine(model=MODEL) as engine:
        adapters = (None, engine.adapters[0])
        for number, adapter in enumerate(adapters):
            work = decode_work(prompt, adapter=adapter, cache_salt=f"0{number}")
            answer, _, _ = await answer_of(engine, work)
            scoring = replace(GREEDY, max_tokens=1, prompt_logprobs=0)
            whole = [*prompt, *answer]
            for other in adapters:
                scored = decode_work(whole, scoring, adapter=other, transfer_id="x2")
                _, _, (first, _) = await answer_of(engine, scored)
                assert isinstance(first, DecodeTokens)
                ranks = {entry.rank for entry in first.prompt_logprobs[-len(answer) :]}
                assert (ranks == {1}) == (other == adapter)
