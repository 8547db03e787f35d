"""Tokens to text in arbitrary batches, always in whole characters."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace_text.detokenizer import IncrementalDetokenizer
from headrace_text.load import ByteCodec

_CODEC = ByteCodec()
_CHARACTERS = st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd")


@settings(deadline=None)
@given(st.lists(st.integers(0, 511), max_size=80))
def test_any_tokens_give_the_same_text_as_decoding_them_at_once(tokens: list[int]) -> None:
    detokenizer = IncrementalDetokenizer(_CODEC, ())
    streamed = "".join(detokenizer.append(token) for token in tokens) + detokenizer.flush()
    held_too_long = "\ufffd" * 2 in _CODEC.decode(tokens)
    if not held_too_long:
        assert streamed == _CODEC.decode(tokens).rstrip("\ufffd")


@settings(deadline=None)
@given(st.text(_CHARACTERS), st.text(max_size=5), st.lists(st.integers(1, 40)))
@example("0", "\ufffd", [])
@example("a€", "", [])
def test_batches_of_any_size_restore_the_text(text: str, prompt: str, sizes: list[int]) -> None:
    detokenizer = IncrementalDetokenizer(_CODEC, _CODEC.encode(prompt))
    tokens = _CODEC.encode(text)
    pieces: list[str] = []
    for size in sizes:
        pieces.append(detokenizer.extend(tokens[:size]))
        tokens = tokens[size:]
    pieces += map(detokenizer.append, tokens)
    assert "".join(pieces) + detokenizer.flush() == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_an_incomplete_character_is_held_back_and_dropped_at_the_end() -> None:
    detokenizer = IncrementalDetokenizer(_CODEC, ())
    assert [detokenizer.append(token) for token in "€".encode()] == ["", "", "€"]
    assert detokenizer.append("é".encode()[0]) == ""
    assert detokenizer.flush() == ""


def test_invalid_bytes_do_not_hold_text_back_for_ever() -> None:
    detokenizer = IncrementalDetokenizer(_CODEC, ())
    pieces = [detokenizer.append(0xFF) for _ in range(12)]
    assert any(pieces)
    assert detokenizer.append(ord("x")).endswith("x")


def test_a_character_that_begins_in_the_prompt_is_returned_whole() -> None:
    first, *rest = "€".encode()
    detokenizer = IncrementalDetokenizer(_CODEC, [*b"ab", first])
    assert [detokenizer.append(token) for token in rest] == ["", "€"]
