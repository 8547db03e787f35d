"""Predicted times to first token: their sum, the decision, and the hint of a refusal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_common.rpc.status import status_of
from headrace_router.early_refusal import (
    DEADLINE,
    POLICY_TARGET,
    REQUEST_TARGET,
    RETRY_S_MAX,
    RETRY_S_MIN,
    FirstTokenBound,
    FirstTokenPrediction,
    is_late,
    refusal,
)

_SECONDS = st.floats(0.0, 500.0)
_PREDICTIONS = st.builds(FirstTokenPrediction, *(5 * [_SECONDS]))
_BOUNDS = st.builds(
    FirstTokenBound, _SECONDS, st.sampled_from((DEADLINE, REQUEST_TARGET, POLICY_TARGET))
)


@given(prediction=_PREDICTIONS, bound=_BOUNDS)
def test_a_request_is_refused_exactly_when_the_sum_of_its_parts_exceeds_the_bound(
    prediction: FirstTokenPrediction, bound: FirstTokenBound
) -> None:
    parts = (
        *(prediction.elapsed_s, prediction.slot_wait_s),
        *(prediction.queue_wait_s, prediction.prefill_s),
    )
    assert is_late(prediction, bound) == (sum(parts) - prediction.error_s > bound.allowed_s)


@given(prediction=_PREDICTIONS, bound=_BOUNDS)
def test_the_hint_is_the_excess_within_its_bounds_and_absent_where_no_wait_helps(
    prediction: FirstTokenPrediction, bound: FirstTokenBound
) -> None:
    error = refusal(prediction, bound)
    if prediction.prefill_s > bound.allowed_s:
        assert error.retry_after_s is None
        assert "shorten the prompt" in error.detail
    else:
        over_s = prediction.total_s - bound.allowed_s
        assert error.retry_after_s == pytest.approx(min(RETRY_S_MAX, max(RETRY_S_MIN, over_s)))
        assert "again later" in error.detail
    # AIP-193: the metadata has every number of the text.
    assert float(error.metadata["predicted_s"]) == pytest.approx(prediction.total_s, abs=1e-3)
    assert float(error.metadata["allowed_s"]) == pytest.approx(bound.allowed_s, abs=1e-3)
    assert error.metadata["bound"] == bound.name
    assert len(status_of(error).details) == (1 if error.retry_after_s is None else 2)
