"""The tokenizer's own step gives the text that decoding in a window gives."""

from __future__ import annotations

import json
from functools import cache
from itertools import chain
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_text.detokenizer import IncrementalDetokenizer
from headrace_text.hugging_face import ByteStep, HuggingFaceCodec, TokenBytes

_BYTES = [f"<0x{value:02X}>" for value in range(256)]
_WORDS = ["▁the", "▁a", "▁", "b", "é", "€", ",", "▁.", "n't"]
_SPECIAL = ["<s>", "</s>"]
# As Llama's: bytes of characters that have no token, and a space before each word.
_SENTENCE_PIECE: dict[str, Any] = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ],
}
# Its text of a token may change the text before, such as a space before a comma.
_WORD_PIECE: dict[str, Any] = {"type": "WordPiece", "prefix": "##", "cleanup": True}


class _WithoutStep(HuggingFaceCodec):
    def decode_step(self, token_ids: Any, *, skip_special_tokens: bool = True) -> None:
        return None


@cache
def _codecs(kind: str) -> tuple[HuggingFaceCodec, HuggingFaceCodec, int]:
    """A codec with a step, the same without, and the number of tokens."""
    folder = Path("models/tiny-llama") if kind == "byte_level" else _folder(kind)
    codec = HuggingFaceCodec(folder)
    return codec, _WithoutStep(folder), codec.vocabulary_size


def _folder(kind: str) -> Path:
    folder = Path(mkdtemp())
    pieces = _SPECIAL + _BYTES + _WORDS
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    special = [
        {
            "id": number,
            "content": piece,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for number, piece in enumerate(_SPECIAL)
    ]
    tokenizer = {
        "version": "1.0",
        "added_tokens": special,
        "decoder": _SENTENCE_PIECE if kind == "sentence_piece" else _WORD_PIECE,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": [], "byte_fallback": True},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "config.json").write_text(json.dumps({"vocab_size": len(pieces)}))
    return folder


def _pieces(codec: HuggingFaceCodec, prompt: list[int], batches: list[list[int]]) -> list[str]:
    detokenizer = IncrementalDetokenizer(codec, prompt)
    return [*map(detokenizer.extend, batches), detokenizer.flush()]


def _tokens(kind: str, size: int) -> st.SearchStrategy[list[int]]:
    if kind != "sentence_piece":
        # No run of special tokens: the window forgets the text before it.
        return st.lists(st.integers(len(_SPECIAL), size - 1), max_size=60)
    # Only whole characters: a step shows invalid bytes as another number of replacements.
    words = st.integers(len(_SPECIAL) + 256, size - 1).map(lambda word: [word])
    characters = st.characters(exclude_categories=["Cs"]).map(
        lambda text: [len(_SPECIAL) + byte for byte in text.encode()]
    )
    return st.lists(words | characters, max_size=25).map(
        lambda parts: list(chain.from_iterable(parts))
    )


@pytest.mark.parametrize("kind", ["byte_level", "sentence_piece", "word_piece"])
@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_the_step_and_the_window_give_the_same_pieces(kind: str, data: st.DataObject) -> None:
    with_step, without, size = _codecs(kind)
    prompt = data.draw(_tokens(kind, size))
    tokens = [[token] for token in data.draw(_tokens(kind, size))]
    assert _pieces(with_step, prompt, tokens) == _pieces(without, prompt, tokens)


@pytest.mark.parametrize("kind", ["byte_level", "sentence_piece", "word_piece"])
@settings(deadline=None, max_examples=100)
@given(data=st.data(), size=st.integers(2, 12))
def test_batches_give_the_text_of_their_tokens_one_by_one(
    kind: str, data: st.DataObject, size: int
) -> None:
    codec, _, count = _codecs(kind)
    prompt, tokens = data.draw(_tokens(kind, count)), data.draw(_tokens(kind, count))
    batches = [tokens[start : start + size] for start in range(0, len(tokens), size)]
    in_batches, one_by_one = (
        IncrementalDetokenizer(codec, prompt),
        IncrementalDetokenizer(codec, prompt),
    )
    for batch in batches:
        assert in_batches.extend(batch) == "".join(map(one_by_one.append, batch))
    assert in_batches.flush() == one_by_one.flush()


@pytest.mark.parametrize("kind", ["byte_level", "sentence_piece", "word_piece"])
def test_the_list_of_the_caller_stays_as_it_is(kind: str) -> None:
    codec, _, count = _codecs(kind)
    tokens = list(range(count - 40, count))
    detokenizer = IncrementalDetokenizer(codec, [])
    detokenizer.extend(tokens)
    detokenizer.append(count - 1)
    assert tokens == list(range(count - 40, count))


def test_a_step_that_fails_gives_way_to_the_window() -> None:
    codec, _, _ = _codecs("byte_level")
    tokens = codec.encode("a long answer")

    class Failing(HuggingFaceCodec):
        def decode_step(self, token_ids: Any, *, skip_special_tokens: bool = True) -> Any:
            step, left = super().decode_step(token_ids), iter(range(3))

            def fail_later(token_id: int) -> str | None:
                if next(left, None) is None or step is None:
                    raise ValueError("invalid prefix")
                return step(token_id)

            return fail_later

    pieces = _pieces(Failing(Path("models/tiny-llama")), [], [[token] for token in tokens])
    assert "".join(pieces) == "a long answer"


def test_an_added_token_with_a_space_is_plain_text() -> None:
    tokens = TokenBytes({0: "Ġa", 1: "two words", 2: "<s>"}.get, [2])
    step = ByteStep(tokens)
    assert step([0, 1, 2, 3]) == " atwo words"
    assert 3 not in tokens, "ids of a worker do not fill the memory"
