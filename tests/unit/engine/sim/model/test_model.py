"""The sim model's closed form by itself."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_engine.interface import Sampling
from headrace_engine.sim.model.bit_mixer import counted_words, mix_int, mix_words
from headrace_engine.sim.model.model import SimModel
from headrace_engine.sim.model.settings import SimSettings, parse_settings

prompts = st.lists(st.integers(0, 99), min_size=1, max_size=32)


def small_model(vocabulary: int = 100) -> SimModel:
    return SimModel(SimSettings(vocabulary=vocabulary))


@given(prompts, st.integers(0, 31))
def test_prefix_sums_can_be_continued(prompt: list[int], cut: int) -> None:
    model = small_model()
    cut = min(cut, len(prompt))
    whole = model.prefix_sums(prompt)
    base = int(whole[cut - 1]) if cut else 0
    assert whole[cut:].tolist() == model.prefix_sums(prompt[cut:], cut, base).tolist()
    for position, token in enumerate(prompt):
        before = int(whole[position - 1]) if position else 0
        assert model.next_sum(token, position, before) == int(whole[position])


def test_order_and_prefix_affect_the_hash() -> None:
    model = small_model()
    assert model.prefix_hashes([1, 2])[-1] != model.prefix_hashes([2, 1])[-1]
    assert model.prefix_hashes([1, 2])[0] == model.prefix_hashes([1, 3])[0]
    assert len(set(model.prefix_hashes([5] * 100).tolist())) == 100


def test_seeds_and_prompts_change_the_expected_answer() -> None:
    model = small_model(32000)
    seeded = [
        model.expected_tokens([1, 2, 3], 8, Sampling(temperature=1.0, seed=seed))
        for seed in (1, 1, 2)
    ]
    assert seeded[0] == seeded[1] != seeded[2]
    assert model.expected_tokens([1, 2, 3], 8) != model.expected_tokens([1, 2, 4], 8)


@pytest.mark.parametrize("text", ["parts=k:8/v:8", "index_layers=2", "state_layers=1", "layers=3"])
def test_every_cache_of_the_model_affects_the_answer(text: str) -> None:
    plain = small_model(32000).expected_tokens([1, 2, 3], 8)
    assert SimModel(parse_settings(f"sim:{text}")).expected_tokens([1, 2, 3], 8) != plain


def test_no_two_parts_hold_the_same_bytes() -> None:
    model = SimModel(parse_settings("sim:parts=k:16/v:16,index_layers=2,state_layers=2"))
    hashes = model.prefix_hashes([1])
    words = [
        value
        for formulas in model.formulas
        for formula in formulas
        if formula.word.itemsize == 8
        for value in formula.words(hashes).ravel().tolist()
    ]
    assert len(set(words)) == len(words)


@given(st.integers(0, (1 << 64) - 1))
def test_both_mixers_agree(value: int) -> None:
    assert int(mix_words(np.array([value], np.uint64))[0]) == mix_int(value)


def test_counted_words_can_start_anywhere() -> None:
    assert counted_words(10, 3).tolist()[4:] == counted_words(6, 3, 4).tolist()
