"""The special tokens around a text, and texts that need no thread."""

from __future__ import annotations

from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from headrace.inference.v1 import inference_pb2
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


async def test_short_texts_of_a_fast_encoder_need_no_thread() -> None:
    codec, workers = ByteCodec(), Mock(max_model_len=dict, adapters=dict)
    preparer = RequestPreparer({"m": codec}, workers, str)
    preparer.threads = threads = Mock(run=AsyncMock())
    for codec.encodes_fast, size, turns in ((False, 3_000, 1), (True, 3_000, 1), (True, 9_000, 2)):
        await preparer.tokenize(inference_pb2.GenerateRequest(text="x" * size), "t")
        assert threads.run.await_count == turns
