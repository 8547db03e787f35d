"""Which worker makes the first token."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headrace.registry.v1 import registry_pb2
from headrace_router.dispatch.messages import (
    BY_DECODE,
    BY_PREFILL,
    FROM_HIDDEN_STATE,
    first_token_maker,
)

REMOVED = 3
"""The policy `logits` of release 0.1, which a registry may have stored."""


def maker(policy: Any, attempt: int = 1, wanted: Any = 0) -> int:
    request: Any = SimpleNamespace(first_token=wanted)
    stored = registry_pb2.Policy(first_token=policy)
    return first_token_maker(request, stored, 0, attempt)


@pytest.mark.parametrize(
    ("policy", "first", "second"),
    [
        (0, BY_PREFILL, BY_PREFILL),
        (BY_DECODE, BY_DECODE, BY_DECODE),
        (BY_PREFILL, BY_PREFILL, BY_PREFILL),
        (FROM_HIDDEN_STATE, FROM_HIDDEN_STATE, BY_DECODE),
        (REMOVED, BY_DECODE, BY_DECODE),
    ],
)
def test_a_policy_holds_for_the_attempts_that_can_follow_it(
    policy: Any, first: int, second: int
) -> None:
    assert [maker(policy, attempt) for attempt in (1, 2)] == [first, second]
    for wanted in (BY_PREFILL, BY_DECODE):
        assert maker(policy, wanted=wanted) == wanted
