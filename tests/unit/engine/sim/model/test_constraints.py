"""Constraints of the simulated model."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_common.errors import InvalidRequest
from headrace_engine.interface import DecodeWork, Sampling, StructuredOutputs
from headrace_engine.sim.model.sampling import check, choice_is_complete, choose_token

VOCABULARY = 1000
GREEDY = Sampling(temperature=0.0)
digests = st.integers(0, (1 << 64) - 1)


def chosen(digest: int, sampling: Sampling, answer: tuple[int, ...] = ()) -> int:
    return choose_token(digest, VOCABULARY, sampling, [1], list(answer)).token_id


def choice(*texts: str) -> Sampling:
    return replace(GREEDY, structured_outputs=StructuredOutputs("choice", choices=texts))


@given(digests, st.sampled_from([("yes", "no", "née"), ("same",), ("ab", "abc")]))
def test_an_answer_is_one_of_the_choices(digest: int, texts: tuple[str, ...]) -> None:
    sampling, answer = choice(*texts), list[int]()
    while not choice_is_complete(sampling, answer):
        answer.append(chosen(digest + len(answer), sampling, tuple(answer)))
    assert bytes(answer).decode() in texts


def test_other_constraints_are_refused_by_name() -> None:
    outputs = StructuredOutputs("regex", "a+")
    work = DecodeWork("t", (1,), replace(GREEDY, structured_outputs=outputs), remote_kv=False)
    with pytest.raises(InvalidRequest) as caught:
        check(work, 100)
    assert (
        "supports choice, json, json_object"
        in caught.value.violations["sampling.structured_outputs.regex"]
    )
