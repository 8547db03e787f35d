"""The special tokens around a text."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

from headrace_frontend.request.preparation import RequestPreparer
from headrace_text.load import ByteCodec


class Framed(ByteCodec):
    """Its tokenizer adds special tokens."""

    def __init__(self, before: list[int], after: list[int]) -> None:
        self._before, self._after = before, after

    def encode(self, text: str, tokens_max: int | None = None) -> list[int]:
        return [*self._before, *super().encode(text), *self._after]

    def encode_part(self, text: str) -> list[int]:
        return super().encode(text)


@pytest.mark.parametrize(("before", "after"), [([], []), ([300], []), ([300, 301], [302])])
def test_special_tokens_around_a_text_are_found(before: list[int], after: list[int]) -> None:
    workers: Any = Mock()
    preparer = RequestPreparer({"m": Framed(before, after)}, workers, lambda tenant: "")
    assert preparer.special_tokens("m") == (before, after)
    preparer.close()
