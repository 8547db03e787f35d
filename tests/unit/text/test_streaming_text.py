"""Tokens to text, and stop texts in it, whatever the pieces."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace_text.bytes import ByteCodec
from headrace_text.detokenizer import TextStream
from headrace_text.stop_strings import StopScanner

_CODEC = ByteCodec()
_CHARACTERS = st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd")
_STOPS = st.lists(st.text("ab€", min_size=1, max_size=4), max_size=4)


def _reference_cut(text: str, stops: list[str]) -> str:
    """Letter by letter: the first stop text to be complete ends the answer where it starts."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))]
    return text


@settings(deadline=None)
@given(st.text(_CHARACTERS), st.text(max_size=5))
@example("0", "\ufffd")
def test_whole_text_comes_back_in_whole_characters(text: str, prompt: str) -> None:
    stream = TextStream(_CODEC.decode, _CODEC.encode(prompt))
    pieces = [stream.push(token) for token in _CODEC.encode(text)]
    assert "".join(pieces) + stream.finish() == text
    assert not any("\ufffd" in piece for piece in pieces)


@settings(deadline=None)
@given(st.lists(st.integers(0, 511), max_size=80))
def test_any_tokens_give_the_text_of_decoding_them_at_once(tokens: list[int]) -> None:
    stream = TextStream(_CODEC.decode, ())
    streamed = "".join(stream.push(token) for token in tokens) + stream.finish()
    held_too_long = "\ufffd" * 2 in _CODEC.decode(tokens)
    if not held_too_long:
        assert streamed == _CODEC.decode(tokens).rstrip("\ufffd")


@settings(deadline=None)
@given(st.text(_CHARACTERS), st.text(max_size=5), st.data())
def test_whole_text_comes_back_for_every_cutting_into_batches(
    text: str, prompt: str, data: st.DataObject
) -> None:
    stream = TextStream(_CODEC.decode, _CODEC.encode(prompt))
    tokens = _CODEC.encode(text)
    pieces: list[str] = []
    while tokens:
        size = data.draw(st.integers(1, 40))
        pieces.append(stream.push_all(tokens[:size]))
        tokens = tokens[size:]
    assert "".join(pieces) + stream.finish() == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_an_unfinished_character_is_held_back_and_dropped_at_the_end() -> None:
    stream = TextStream(_CODEC.decode, ())
    assert [stream.push(token) for token in "€".encode()] == ["", "", "€"]
    assert stream.push("é".encode()[0]) == ""
    assert stream.finish() == ""


def test_bytes_that_never_become_a_character_do_not_hold_the_answer_back() -> None:
    stream = TextStream(_CODEC.decode, ())
    pieces = [stream.push(0xFF) for _ in range(12)]
    assert any(pieces)
    assert stream.push(ord("x")).endswith("x")


def test_a_character_begun_in_the_prompt_is_sent_whole() -> None:
    first, *rest = "€".encode()
    stream = TextStream(_CODEC.decode, [*b"ab", first])
    assert [stream.push(token) for token in rest] == ["", "€"]


@settings(deadline=None)
@given(st.text("ab€x", max_size=40), _STOPS, st.data())
def test_stop_texts_cut_alike_for_every_cutting_into_pieces(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    scanner = StopScanner(stops)
    answer, rest = "", text
    while rest and not scanner.stopped:
        size = data.draw(st.integers(1, len(rest)))
        answer += scanner.push(rest[:size])
        rest = rest[size:]
    answer += scanner.finish()
    assert answer == _reference_cut(text, stops)


def test_what_may_become_a_stop_text_is_held_back() -> None:
    scanner = StopScanner(["END"])
    assert scanner.push("a E") == "a "
    assert scanner.push("N") == ""
    assert scanner.push("x") == "ENx"
    assert scanner.push("EN") == ""
    assert not scanner.stopped
    assert scanner.finish() == "EN"
