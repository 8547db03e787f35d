"""What answers take is guessed from those that ended, and rather too short than too long."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_decode.completion_time import CompletionTimeEstimator


def test_nothing_is_expected_of_what_is_unknown() -> None:
    assert CompletionTimeEstimator().expected_s(1_000_000) == 0


def test_the_first_answer_is_all_that_is_known() -> None:
    estimator = CompletionTimeEstimator()
    estimator.record(lead_s=0.5, stream_s=0.9, tokens=10, max_tokens=40)
    assert estimator.expected_s(40) == pytest.approx(0.5 + 10 * 0.1)
    assert estimator.expected_s(80) == pytest.approx(0.5 + 20 * 0.1)


def test_a_short_lead_is_believed_at_once_and_a_long_one_slowly() -> None:
    estimator = CompletionTimeEstimator()
    estimator.record(lead_s=0.5, stream_s=0.0, tokens=1, max_tokens=1)
    estimator.record(lead_s=0.1, stream_s=0.0, tokens=1, max_tokens=1)
    assert estimator.expected_s(1) == pytest.approx(0.1)
    estimator.record(lead_s=1.1, stream_s=0.0, tokens=1, max_tokens=1)
    assert estimator.expected_s(1) == pytest.approx(0.2)


def test_an_answer_of_one_token_tells_nothing_of_the_gap_between_two() -> None:
    estimator = CompletionTimeEstimator()
    estimator.record(lead_s=0.0, stream_s=0.0, tokens=1, max_tokens=1)
    estimator.record(lead_s=0.0, stream_s=1.0, tokens=11, max_tokens=11)
    for _ in range(100):
        estimator.record(lead_s=0.0, stream_s=0.0, tokens=1, max_tokens=1)
    assert estimator.token_s == pytest.approx(0.1)


def test_a_clock_that_was_set_back_does_no_harm() -> None:
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
def test_the_guess_stays_within_what_was_seen(
    answers: list[tuple[float, float, int, int]],
) -> None:
    estimator = CompletionTimeEstimator()
    for lead_s, stream_s, tokens, max_tokens in answers:
        estimator.record(lead_s=lead_s, stream_s=stream_s, tokens=tokens, max_tokens=max_tokens)
    longest_token_s = max(stream_s / max(1, tokens - 1) for _, stream_s, tokens, _ in answers)
    longest_s = max(lead_s for lead_s, *_ in answers) + 100 * longest_token_s
    assert 0 <= estimator.expected_s(100) <= longest_s * 1.000001
