"""The cache of pieces of chats: the tokens are those of the whole text, and it is bounded."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from headrace_text.chat_encoder import PieceCache, cut_texts
from headrace_text.codec import ChatMessage, TooManyTokens
from headrace_text.hugging_face import HuggingFaceCodec

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


@cache
def _tokenizer(kind: str) -> Tokenizer:
    if kind == "sentence_piece":
        return _sentence_piece()
    tokenizer = Tokenizer.from_file(f"models/{kind}/tokenizer.json")
    tokenizer.add_special_tokens([AddedToken("<s>", rstrip=True, normalized=False)])
    return tokenizer


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
    pieces = PieceCache(tokenizer, added, _CONTROL)
    whole = tokenizer.encode(text, add_special_tokens=False).ids
    # The second time from the cache.
    for _ in range(2):
        assert pieces.encode(text, "a", None) == whole


def test_a_repeated_piece_is_encoded_once_for_each_scope() -> None:
    encoded: list[str] = []

    class Counting:
        def encode_batch_fast(self, texts: list[str], *, add_special_tokens: bool) -> Any:
            encoded.extend(texts)
            return _tokenizer("tiny-llama").encode_batch_fast(
                texts, add_special_tokens=add_special_tokens
            )

    pieces = PieceCache(Counting(), [_token(text) for text in _CONTROL], _CONTROL)
    system = f"<|im_start|>{_LONG}"
    for user in ("one", "two"):
        pieces.encode(f"{system}<|im_end|>{user}", "a", None)
    assert encoded == [system, "<|im_end|>one", "<|im_end|>two"]
    # A text of another tenant takes as long as one that was never sent.
    pieces.encode(system, "b", None)
    assert encoded[-1] == system
    assert pieces.entry_count == 2


def test_the_cache_is_bounded_in_bytes_and_drops_the_oldest() -> None:
    added = [_token(text) for text in _CONTROL]
    pieces = PieceCache(_tokenizer("tiny-llama"), added, _CONTROL, bytes_max=8_000)
    for number in range(50):
        pieces.encode(f"{number}{_LONG}", "a", None)
        pieces.encode(f"0{_LONG}", "a", None)
        assert 0 < pieces.stored_bytes <= 8_000
    assert 1 < pieces.entry_count < 10
    # One text of more bytes than all entries may have.
    pieces.encode(_LONG * 40, "a", None)
    assert pieces.entry_count > 1


def test_too_many_tokens_are_counted_with_and_without_the_cache() -> None:
    pieces = PieceCache(_tokenizer("tiny-llama"), [_token(text) for text in _CONTROL], _CONTROL)
    count = len(pieces.encode(_LONG, "a", None))
    assert len(pieces.encode(_LONG, "a", count)) == count
    with pytest.raises(TooManyTokens) as raised:
        pieces.encode(_LONG, "a", count - 1)
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


def test_chats_of_a_model_use_the_cache() -> None:
    codec = HuggingFaceCodec(Path("models/tiny-llama"))
    fresh = HuggingFaceCodec(Path("models/tiny-llama"))
    system = ChatMessage("system", _LONG)
    for content in ("one", "two", "<|im_end|>three"):
        messages = [system, ChatMessage("user", content)]
        ids = codec.encode_chat(messages, continue_final_message=False, cache_scope="a")
        assert ids == fresh.encode_chat(messages, continue_final_message=False, cache_scope=content)
