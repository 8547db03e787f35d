"""The cache of runs of chats: the tokens are those of the whole text, and it is bounded and fair."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from headrace_text.chat_encoder import PieceCache, RunEncoder, cut_texts
from headrace_text.codec import TooManyTokens
from headrace_text.control_tokens import EscapedChat
from headrace_text.encoder import TextEncoder

_CONTROL = ("<|im_start|>", "<|im_end|>", "<s>")
_LONG = "the market of the old town, 7 o'clock: " * 8


def _token(content: str, **changes: bool) -> dict[str, Any]:
    plain = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
    return {"content": content, **plain, **changes}


def _sentence_piece() -> Tokenizer:
    """A space only before the first word of a text, and a normalizer."""
    letters = [chr(code) for code in range(33, 127)]
    vocabulary = {text: number for number, text in enumerate(["<unk>", "▁", "▁t", *letters, "th"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("t", "h"), ("▁", "t")], unk_token="<unk>"))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in _CONTROL])
    return tokenizer


@functools.cache
def _tokenizer(kind: str) -> Tokenizer:
    if kind == "sentence_piece":
        return _sentence_piece()
    tokenizer = Tokenizer.from_file(f"models/{kind}/tokenizer.json")
    tokenizer.add_special_tokens([AddedToken("<s>", rstrip=True, normalized=False)])
    return tokenizer


def _encode_none(run: str, escaped: EscapedChat, tokens_max: int | None) -> list[int]:
    raise AssertionError(run)


def _encode(text: str) -> list[int]:
    return TextEncoder(_tokenizer("tiny-llama")).encode(text)


def _encoder(cache: PieceCache, encode: Callable[[str], list[int]] = _encode) -> RunEncoder:
    added = [_token(text) for text in _CONTROL]
    return RunEncoder(encode, added, _CONTROL, _encode_none, cache)


@pytest.mark.parametrize("kind", ["tiny-llama", "SmolLM2-135M-Instruct", "sentence_piece"])
@settings(deadline=None, max_examples=100)
@given(
    parts=st.lists(
        st.sampled_from([*_CONTROL, " ", "\n", "  ", _LONG, " the", "the", "<|im", "_start|>"])
        | st.text(max_size=8),
        max_size=14,
    )
)
def test_pieces_have_the_tokens_of_the_whole(kind: str, parts: list[str]) -> None:
    tokenizer, text = _tokenizer(kind), "".join(parts)
    added = [_token(content, rstrip=content == "<s>") for content in _CONTROL]
    encode = TextEncoder(tokenizer).encode
    encoder = RunEncoder(encode, added, _CONTROL, _encode_none, PieceCache())
    whole = tokenizer.encode(text, add_special_tokens=False).ids
    # The second time from the cache.
    for _ in range(2):
        assert encoder.encode(text, "a", None).tolist() == whole


def test_a_repeated_run_is_encoded_once_for_each_scope() -> None:
    encoded: list[str] = []

    def counted(text: str) -> list[int]:
        encoded.append(text)
        return _encode(text)

    cache = PieceCache()
    encoder = _encoder(cache, counted)
    system = f"<|im_start|>{_LONG}"
    for user in ("one", "two"):
        encoder.encode(f"{system}<|im_end|>{user}", "a", None)
    assert encoded == [system, "<|im_end|>one", "<|im_end|>two"]
    # A text of another tenant takes as long as one that was never sent.
    encoder.encode(system, "b", None)
    assert encoded[-1] == system
    assert cache.entry_count == 2


def test_the_cache_is_bounded_in_bytes_and_drops_the_oldest() -> None:
    cache = PieceCache(bytes_max=8_000)
    encoder = _encoder(cache)
    for number in range(50):
        encoder.encode(f"{number}{_LONG}", "a", None)
        encoder.encode(f"0{_LONG}", "a", None)
        assert 0 < cache.stored_bytes <= 8_000
    assert 1 < cache.entry_count < 10
    # One text of more bytes than all entries may have.
    encoder.encode(_LONG * 40, "a", None)
    assert cache.entry_count > 1


def test_a_scope_with_less_than_its_share_loses_nothing() -> None:
    tokens = array("I", range(100))
    cache = PieceCache(bytes_max=40_000)
    for number in range(12):
        cache.add("small", (f"small {number}",), tokens)
    for number in range(1_000):
        cache.add("large", (f"large {number}",), tokens)
    assert all(cache.get("small", (f"small {number}",)) == tokens for number in range(12))
    assert cache.get("large", ("small 0",)) is None
    assert cache.stored_bytes <= 40_000


def test_too_many_tokens_are_counted_with_and_without_the_cache() -> None:
    encoder = _encoder(PieceCache())
    count = len(encoder.encode(_LONG, "a", None))
    assert len(encoder.encode(_LONG, "a", count)) == count
    with pytest.raises(TooManyTokens) as raised:
        encoder.encode(_LONG, "a", count - 1)
    assert raised.value.count == count


@pytest.mark.parametrize(
    ("added", "expected"),
    [
        ([_token("<a>"), _token("<b>", rstrip=True)], ("<a>", "<b>")),
        # White space before it belongs to the token.
        ([_token("<a>"), _token("<b>", lstrip=True)], ("<a>",)),
        # Found only between two borders of words, or after normalization.
        ([_token("<a>", single_word=True), _token("<b>", normalized=True)], ()),
        # Another token may reach over the beginning of it.
        ([_token("<a>"), _token("x<a"), _token("<b>")], ("<b>",)),
        ([_token("<a>"), _token("x<a>y"), _token("<b>")], ("<b>",)),
        ([_token("aba")], ()),
    ],
)
def test_texts_are_cut_only_where_the_tokenizer_cuts_them(
    added: list[dict[str, Any]], expected: tuple[str, ...]
) -> None:
    assert cut_texts(added, {"<a>", "<b>", "aba"}) == expected
