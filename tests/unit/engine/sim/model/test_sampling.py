"""Choice of tokens from a digest."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_engine.interface import Sampling
from headrace_engine.sim.model.sampling import choose_token

VOCABULARY = 1000
digests = st.integers(0, (1 << 64) - 1)


def tokens_of(sampling: Sampling) -> set[int]:
    """The tokens that 400 seeds draw."""
    seeded = (replace(sampling, seed=seed) for seed in range(400))
    return {choose_token(5, VOCABULARY, each, [0] * 3, []).token_id for each in seeded}


@given(digests, st.integers(2, 60) | st.sampled_from([511, 512, 513, 32_000]))
def test_candidates_are_in_the_vocabulary(digest: int, vocabulary: int) -> None:
    choice = choose_token(digest, vocabulary, Sampling(temperature=0.0, logprobs=20), [1], [])
    assert choice.logprobs is not None
    ids = [token for token, _ in choice.logprobs.alternatives]
    assert len(set(ids)) == len(ids) == min(20, vocabulary)
    lowest = 256 if vocabulary >= 512 else 0
    assert all(lowest <= token < vocabulary for token in ids)
    assert choose_token(digest, vocabulary, Sampling(temperature=0.0), [1], []).token_id == ids[0]


@given(digests)
def test_logprobs_are_probabilities_and_greedy_takes_the_likeliest(digest: int) -> None:
    choice = choose_token(digest, VOCABULARY, Sampling(temperature=0.0, logprobs=20), [1], [])
    assert choice.logprobs is not None
    values = [value for _, value in choice.logprobs.alternatives]
    assert values == sorted(values, reverse=True)
    assert 0.5 < sum(math.exp(value) for value in values) <= 1 + 1e-9
    assert choice.logprobs.alternatives[0] == (choice.token_id, choice.logprobs.logprob)


@given(digests, digests)
def test_greedy_does_not_depend_on_asking_for_logprobs(digest: int, seed: int) -> None:
    plain = choose_token(digest, VOCABULARY, Sampling(temperature=0.0), [1], [])
    asked = choose_token(digest, VOCABULARY, Sampling(temperature=0.0, logprobs=0), [1], [])
    assert plain.token_id == asked.token_id
    assert asked.logprobs is not None
    assert asked.logprobs.alternatives == ()
    seeded = Sampling(temperature=1e-4, seed=seed >> 1)
    assert choose_token(digest, VOCABULARY, seeded, [1], []).token_id == plain.token_id


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=2.0, top_k=2),
        Sampling(temperature=2.0, top_p=0.2),
        Sampling(temperature=2.0, min_p=0.9),
    ],
)
def test_filters_keep_few_tokens(sampling: Sampling) -> None:
    kept = tokens_of(sampling)
    everything = tokens_of(Sampling(temperature=2.0))
    assert len(kept) < len(everything)
    assert kept <= everything


def test_top_k_one_is_greedy_and_top_k_two_draws_both() -> None:
    greedy = choose_token(5, VOCABULARY, Sampling(temperature=0.0), [0] * 3, []).token_id
    assert tokens_of(Sampling(top_k=1)) == {greedy}
    assert len(tokens_of(Sampling(top_k=2))) == 2


def test_penalties_lower_the_probability_of_earlier_tokens() -> None:
    greedy = choose_token(5, VOCABULARY, Sampling(temperature=0.0), [1], []).token_id
    for sampling in (
        Sampling(temperature=0.0, presence_penalty=2.0),
        Sampling(temperature=0.0, frequency_penalty=2.0),
        Sampling(temperature=0.0, repetition_penalty=1.9),
    ):
        assert choose_token(5, VOCABULARY, sampling, [1], [greedy]).token_id != greedy
    repetition = Sampling(temperature=0.0, repetition_penalty=1.9)
    assert choose_token(5, VOCABULARY, repetition, [greedy], []).token_id != greedy
    presence = Sampling(temperature=0.0, presence_penalty=2.0)
    assert choose_token(5, VOCABULARY, presence, [greedy], []).token_id == greedy
