"""Errors rebuilt from their reasons."""

from __future__ import annotations

import pytest

from headrace_common.errors import HeadraceError, InternalError, TransferFailed, from_reason


@pytest.mark.parametrize("default", [InternalError, TransferFailed])
def test_an_unknown_reason_gives_the_default_and_is_named(default: type[HeadraceError]) -> None:
    error = from_reason("NO_SUCH_REASON", "detail", default=default)
    assert (type(error), error.detail) == (default, "NO_SUCH_REASON: detail")


def test_added_metadata_replaces_values_with_the_same_key() -> None:
    given = {"worker_id": "decode-0", "attempts": "1"}
    error = TransferFailed("detail", metadata=given)
    error.add_metadata(attempts="2")
    assert error.metadata == {"worker_id": "decode-0", "attempts": "2"}
    assert given["attempts"] == "1"
