"""Which rank sends hidden states, and in which forms."""

from __future__ import annotations

import pytest

from headrace_kv.hidden_state import (
    BYTES_MAX,
    HiddenFormat,
    hidden_state_rank,
)
from headrace_kv.layout import KvLayout

FORM = HiddenFormat("bfloat16", 50)


@pytest.mark.parametrize("stages, ranks, expected", [(1, 1, 0), (1, 4, 0), (3, 2, 4)])
def test_the_first_rank_of_the_last_stage_sends_hidden_states(
    stages: int, ranks: int, expected: int
) -> None:
    layout = KvLayout("m", ranks, (), tuple(range(stages)))
    assert hidden_state_rank(layout) == expected


@pytest.mark.parametrize(
    ("form", "supported"),
    [
        (FORM, True),
        (HiddenFormat("float32", BYTES_MAX // 4), True),
        (HiddenFormat("float32", BYTES_MAX // 4 + 1), False),
        (HiddenFormat("float64", 50), False),
        (HiddenFormat("bfloat16", 0), False),
    ],
    ids=str,
)
def test_forms_that_one_message_carries(form: HiddenFormat, supported: bool) -> None:
    assert form.is_supported == supported
