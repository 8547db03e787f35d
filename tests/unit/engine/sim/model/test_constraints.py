"""Constraints of the simulated model."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_common.errors import InvalidRequest
from headrace_engine.interface import DecodeWork, Sampling, StructuredOutputs
from headrace_engine.sim.answer import check_decode
from headrace_engine.sim.model.sampling import choice_is_complete, choose_token

VOCABULARY = 1000
GREEDY = Sampling(temperature=0.0)
digests = st.integers(0, (1 << 64) - 1)


def chosen(digest: int, sampling: Sampling, answer: tuple[int, ...] = ()) -> int:
    return choose_token(digest, VOCABULARY, sampling, [1], list(answer)).token_id


def choice(*texts: str) -> Sampling:
    return replace(GREEDY, structured_outputs=StructuredOutputs("choice", choices=texts))


@given(digests)
def test_a_bias_makes_a_token_likely_or_prevents_it(digest: int) -> None:
    assert chosen(digest, replace(GREEDY, logit_bias=((7, 100.0),))) == 7
    free = chosen(digest, GREEDY)
    assert chosen(digest, replace(GREEDY, logit_bias=((free, -100.0),))) != free


@given(digests)
def test_only_allowed_tokens_are_chosen(digest: int) -> None:
    hot = Sampling(temperature=2.0, seed=digest >> 1, allowed_token_ids=(3, 4))
    assert chosen(digest, hot) in (3, 4)


@given(digests)
def test_a_sequence_is_prevented_at_its_last_token(digest: int) -> None:
    free = chosen(digest, GREEDY, (5, 6))
    prevented = replace(GREEDY, bad_token_sequences=((5, 6, free),))
    assert chosen(digest, prevented, (5, 6)) != free
    assert chosen(digest, replace(prevented, bad_token_sequences=((6, 5, free),)), (5, 6)) == free


@given(digests)
def test_no_stop_token_comes_early(digest: int) -> None:
    stop = chosen(digest, GREEDY)
    lasting = replace(GREEDY, stop_token_ids=(stop,), min_tokens=2)
    assert chosen(digest, lasting, (stop,)) != stop
    assert chosen(digest, lasting, (1, 2)) == stop


@given(digests, st.sampled_from([("yes", "no", "née"), ("same",), ("ab", "abc")]))
def test_an_answer_is_one_of_the_choices(digest: int, texts: tuple[str, ...]) -> None:
    sampling, answer = choice(*texts), list[int]()
    while not choice_is_complete(sampling, answer):
        answer.append(chosen(digest + len(answer), sampling, tuple(answer)))
    assert bytes(answer).decode() in texts


def test_different_digests_make_different_choices() -> None:
    first = {chosen(digest, choice("yes", "no")) for digest in range(20)}
    assert first == {ord("y"), ord("n")}


def test_other_constraints_are_refused_by_name() -> None:
    outputs = StructuredOutputs("regex", "a+")
    work = DecodeWork("t", (1,), replace(GREEDY, structured_outputs=outputs), remote_kv=False)
    with pytest.raises(InvalidRequest) as caught:
        check_decode(work, 100)
    assert (
        "supports choice, json, json_object"
        in caught.value.violations["sampling.structured_outputs.regex"]
    )
