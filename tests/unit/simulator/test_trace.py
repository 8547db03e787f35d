"""Traces of Mooncake's form, and what is wrong with a line."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace_common.errors import ConfigError
from headrace_simulator.trace import BLOCK_TOKENS, read_trace
from tests.unit.simulator.samples import request


def line(**changes: Any) -> str:
    entry = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}
    return json.dumps({**entry, **changes})


def test_requests_come_in_the_order_of_arrival() -> None:
    first, second = read_trace([line(timestamp=2500), "", line(timestamp=500, hash_ids=[7])])
    assert (first.number, first.arrival_s, first.hash_ids) == (0, 0.5, (7,))
    assert (second.number, second.arrival_s, second.prompt_tokens) == (1, 2.5, 600)


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("{", "line 1 .* no JSON"),
        ("[]", "line 1 .* no JSON object"),
        (line(timestamp=-1), "timestamp"),
        (line(input_length=0), "input_length"),
        (line(output_length="5"), "output_length"),
        (line(hash_ids=[1, -2]), "hash_ids"),
        (line(priority="urgent"), "priority must be one of high, normal, low"),
        (line(priority=1), "priority must be one of"),
        (line(hash_ids=[1, 2, 3]), "3 hash_ids are more than the blocks"),
    ],
)
def test_a_wrong_line_is_named_with_its_field(text: str, field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        read_trace([text])


def test_equal_ids_are_equal_tokens_and_blocks_without_ids_are_unlike_all_others() -> None:
    one = request(0, prompt_tokens=3 * BLOCK_TOKENS, ids=(4, 5)).token_words()
    other = request(1, prompt_tokens=3 * BLOCK_TOKENS + 7, ids=(4, 6)).token_words()
    size = 4 * BLOCK_TOKENS
    assert len(one) == len(other) == 3 * size
    assert one[:size] == other[:size]
    assert one[size : 2 * size] != other[size : 2 * size]
    assert one[2 * size :] != other[2 * size :]
