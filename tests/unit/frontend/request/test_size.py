"""The bytes of a request follow from the contexts of the models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_common.errors import InvalidRequest
from headrace_common.limits import IMAGES_BYTES_MAX, JSON_PARTS_MAX, UNKNOWN_CONTEXT_TOKENS
from headrace_frontend.request.json_text import count_values, is_text, values_at_most
from headrace_frontend.request.size import (
    RequestSizeCheck,
    needed_request_bytes,
    request_bytes_max,
)


def test_a_request_for_the_longest_context_fits_the_bound() -> None:
    default = needed_request_bytes(UNKNOWN_CONTEXT_TOKENS)
    assert request_bytes_max([]) == request_bytes_max([0, 2_048]) == default
    long = 10 * UNKNOWN_CONTEXT_TOKENS
    bytes_max = request_bytes_max([2_048, long])
    assert bytes_max == needed_request_bytes(long) > default
    check = RequestSizeCheck(lambda: {"short": 2_048, "long": long})
    check.check(bytes_max)
    with pytest.raises(InvalidRequest, match="needs at most"):
        check.check(bytes_max + 1)


def _values(value: Any) -> Iterator[tuple[bool, bool]]:
    """For each value and name: whether it is a value, and whether it is a string, a name, an array or an object."""
    yield True, isinstance(value, str | list | dict)
    if isinstance(value, dict):
        for name, one in value.items():
            yield from ((False, isinstance(name, str)), *_values(one))
    elif isinstance(value, list):
        for one in value:
            yield from _values(one)


_JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.integers() | st.text(alphabet='a,[{}]"\\:\ud800é', max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=20,
)


@given(_JSON)
def test_values_are_counted_as_a_parser_finds_them(value: Any) -> None:
    data = json.dumps(value).encode()
    found = list(_values(value))
    values, parts = count_values(data, 1_000)
    # A container without a member counts for one more.
    assert sum(is_value for is_value, _ in found) <= values <= 2 * len(found)
    assert values <= values_at_most(data)
    assert parts == sum(is_part for _, is_part in found)


@pytest.mark.parametrize(
    "body", [b'"",' * 70_000, b"[]," * 70_000, b'{"a":' * 33_000, b"1," * 600_000]
)
def test_a_body_of_many_values_is_rejected_before_it_is_parsed(body: bytes) -> None:
    check = RequestSizeCheck(lambda: {"sim": UNKNOWN_CONTEXT_TOKENS})
    with pytest.raises(InvalidRequest, match=f"at most {JSON_PARTS_MAX} strings"):
        check.check_json(body)


def test_a_request_with_images_may_have_their_bytes_too() -> None:
    check = RequestSizeCheck(lambda: {"sim": 2_048}, images=True)
    largest = IMAGES_BYTES_MAX * 4 // 3
    check.check(largest)
    assert largest < request_bytes_max((), images=True) < largest + 8 * 2**20
    with pytest.raises(InvalidRequest):
        RequestSizeCheck(lambda: {"sim": 2_048}).check(largest)
    with pytest.raises(InvalidRequest):
        check.check(largest + 4 * 2**20)


@pytest.mark.parametrize(
    "body", [b'"' + b"a, [b] {c}" * 100_000 + b'"', b"31999," * 500_000, b'{"a":"b"},' * 13_000]
)
def test_long_prose_and_many_tokens_are_accepted(body: bytes) -> None:
    check = RequestSizeCheck(lambda: {"sim": UNKNOWN_CONTEXT_TOKENS})
    assert check.check_json(body) > 0


@given(
    st.lists(st.sampled_from(["\\ud800", "\\uDBFF", "\\udc00", "\\ude00", "\\\\", "\\u0041", "a"]))
)
def test_half_of_a_surrogate_pair_is_no_text(parts: list[str]) -> None:
    text = json.dumps(None).replace("null", f'"{"".join(parts)}"')
    try:
        json.loads(text).encode()
    except UnicodeEncodeError:
        assert not is_text(text)
    else:
        assert is_text(text)
