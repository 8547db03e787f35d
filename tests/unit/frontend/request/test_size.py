"""The bytes of a request follow from the contexts of the models."""

from __future__ import annotations

import pytest

from headrace_common.errors import InvalidRequest
from headrace_common.limits import UNKNOWN_CONTEXT_TOKENS
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
