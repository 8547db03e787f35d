"""The time of an answer is estimated from completed ones, and tends to be too short."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_decode.completion_time import CompletionTimeEstimator


def test_the_estimate_is_zero_without_answers() -> None:
    assert CompletionTimeEstimator().expected_s(1_000_000) == 0


def test_the_first_answer_sets_the_estimate() -> None:
    estimator = CompletionTimeEstimator()
    estimator.record(lead_s=0.5, stream_s=0.9, tokens=10, max_tokens=40)
    assert estimator.expected_s(40) == pytest.approx(0.5 + 10 * 0.1)
    assert estimator.expected_s(80) == pytest.approx(0.5 + 20 * 0.1)


def test_a_short_lead_counts_at_once_and_a_long_one_slowly() -> None:
    estimator = CompletionTimeEstimator()
    estimator.record(lead_s=0.5, stream_s=0.0, tokens=1, max_tokens=1)
    estimator.record(lead_s=0.1, stream_s=0.0, tokens=1, max_tokens=1)
    assert estimator.expected_s(1) == pytest.approx(0.1)
    estimator.record(lead_s=1.1, stream_s=0.0, tokens=1, max_tokens=1)
    assert estimator.expected_s(1) == pytest.approx(0.2)


def test_an_answer_of_one_token_does_not_change_the_token_time() -> None:
    estimator = CompletionTimeEstimator()
    estimator.record(lead_s=0.0, stream_s=0.0, tokens=1, max_tokens=1)
    estimator.record(lead_s=0.0, stream_s=1.0, tokens=11, max_tokens=11)
    for _ in range(100):
        estimator.record(lead_s=0.0, stream_s=0.0, tokens=1, max_tokens=1)
    assert estimator.token_s == pytest.approx(0.1)


def test_negative_times_count_as_zero() -> None:
    estimator = CompletionTimeEstimator()
    estimator.record(lead_s=-5.0, stream_s=-5.0, tokens=3, max_tokens=3)
    assert estimator.expected_s(100) == 0


@given(
    st.lists(
        st.tuples(st.floats(0, 100), st.floats(0, 100), st.integers(1, 50), st.integers(50, 100)),
        min_size=1,
        max_size=50,
    )
)
def test_the_estimate_stays_within_the_recorded_answers(
    answers: list[tuple[float, float, int, int]],
) -> None:
    estimator = CompletionTimeEstimator()
    for lead_s, stream_s, tokens, max_tokens in answers:
        estimator.record(lead_s=lead_s, stream_s=stream_s, tokens=tokens, max_tokens=max_tokens)
    longest_token_s = max(stream_s / max(1, tokens - 1) for _, stream_s, tokens, _ in answers)
    longest_s = max(lead_s for lead_s, *_ in answers) + 100 * longest_token_s
    assert 0 <= estimator.expected_s(100) <= longest_s * 1.000001
