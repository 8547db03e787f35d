"""The finder of fixed texts: leftmost-longest, as tokenizers find added tokens, whatever the texts are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_text import control_tokens
from headrace_text.control_tokens import LiteralFinder

_texts = st.text("ab<|>.*(", min_size=1, max_size=5)


def _spans(texts: set[str], text: str) -> list[tuple[int, int]]:
    found, position = [], 0
    while position < len(text):
        here = [len(one) for one in texts if text.startswith(one, position)]
        if here:
            found.append((position, position + max(here)))
        position += max(here, default=1)
    return found


@given(st.sets(_texts, max_size=12), st.text("ab<|>.*(", max_size=60), st.integers(1, 9))
def test_it_finds_the_longest_at_each_place(texts: set[str], text: str, size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        # Matches reach over the ends of slices.
        patch.setattr(control_tokens, "_SLICE_CHARACTERS", size)
        assert list(LiteralFinder(texts).spans(text)) == _spans(texts, text)


def test_the_texts_of_a_large_vocabulary_are_found() -> None:
    texts = {f"<|reserved_special_token_{number}|>" for number in range(1_000)}
    text = "x".join(sorted(texts))
    found = [text[start:end] for start, end in LiteralFinder(texts).spans(text)]
    assert found == sorted(texts)
