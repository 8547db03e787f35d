"""Tokens reach messages as they are, whatever their number and size."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from headrace.prefill.v1 import prefill_pb2
from headrace_common.rpc.token_ids import detach_token_ids, token_ids_message

_words = st.lists(st.integers(0, 2**32 - 1), max_size=300)


@given(_words)
def test_an_array_becomes_a_message(words: list[int]) -> None:
    assert list(token_ids_message(array("I", words)).ids) == words


@given(_words)
def test_tokens_leave_their_message_and_nothing_else_does(words: list[int]) -> None:
    task = prefill_pb2.PrefillTask(transfer_id="x", token_ids=words)
    assert list(detach_token_ids(task).ids) == words
    assert task == prefill_pb2.PrefillTask(transfer_id="x")
