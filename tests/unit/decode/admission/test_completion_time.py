"""The time of an answer is estimated from completed ones, and tends to be too short."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_decode.admission.completion_time import CompletionTimeEstimator


# Answers: lead, stream, tokens and max_tokens.
@pytest.mark.parametrize(
    ("answers", "max_tokens", "expected_s"),
    [
        ([], 1_000_000, 0.0),
        ([(0.5, 0.9, 10, 40)], 40, 0.5 + 10 * 0.1),
        ([(0.5, 0.9, 10, 40)], 80, 0.5 + 20 * 0.1),
        # A short lead counts at once, and a long one slowly.
        ([(0.5, 0.0, 1, 1), (0.1, 0.0, 1, 1)], 1, 0.1),
        ([(0.5, 0.0, 1, 1), (0.1, 0.0, 1, 1), (1.1, 0.0, 1, 1)], 1, 0.2),
        # Negative times count as zero.
        ([(-5.0, -5.0, 3, 3)], 100, 0.0),
    ],
)
def test_the_estimate_follows_from_completed_answers(
    answers: list[tuple[float, float, int, int]], max_tokens: int, expected_s: float
) -> None:
    estimator = CompletionTimeEstimator()
    for lead_s, stream_s, tokens, most in answers:
        estimator.record(lead_s=lead_s, stream_s=stream_s, tokens=tokens, max_tokens=most)
    assert estimator.expected_s(max_tokens) == pytest.approx(expected_s)


def test_an_answer_of_one_token_does_not_change_the_token_time() -> None:
    estimator = CompletionTimeEstimator()
    estimator.record(lead_s=0.0, stream_s=0.0, tokens=1, max_tokens=1)
    estimator.record(lead_s=0.0, stream_s=1.0, tokens=11, max_tokens=11)
    for _ in range(100):
        estimator.record(lead_s=0.0, stream_s=0.0, tokens=1, max_tokens=1)
    assert estimator.token_s == pytest.approx(0.1)


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
