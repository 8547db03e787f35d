"""Token ids of texts: by kitoken where its ids are equal, else by Hugging Face's library, which is slower.

Neither holds the global interpreter lock. A panic in kitoken ends the process, and its regular expressions panic when a
lookaround has to go back more than a million characters. So kitoken gets no longer texts, and of expressions with a
lookaround only the usual one at the end of spaces.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count, product
from pathlib import Path
from typing import Any, Final

from kitoken import Kitoken
from tokenizers import Tokenizer

from headrace_common.errors import ConfigError
from headrace_text.codec import TooManyTokens

CHECK_INTERVAL: Final = 1_000
"""One text in this many is encoded by both."""
FAST_CHARACTERS_MAX: Final = 131_072
_LOG = logging.getLogger(__name__)
_CORPUS: Final = Path(__file__).with_name("corpus.txt").read_bytes().decode()
_ADDED_TOKENS_MAX: Final = 10_000
_SPACES_END: Final = r"\s+(?!\S)"
# As kitoken's configuration is printed, with two backslashes for one: lookarounds, atomic groups and references.
_HARD: Final = re.compile(r"\(\?<?[=!]|\(\?>|\\\\[1-9gkGK]")
# What ByteLevel means by `use_regex`. kitoken has another one in its place, which gives "\n's" other tokens.
_BYTE_LEVEL_WORDS: Final = (
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|" + _SPACES_END + r"|\s+"
)


class TextEncoder:
    """Encodes by Hugging Face's library. Thread-safe. The text of an added token becomes that token."""

    differences = 0
    """Texts with other ids by kitoken, since the start."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """The ids of a text, at will with the special tokens that the tokenizer adds around it."""
        ids: list[int] = encode(self._tokenizer, text, add_special_tokens=add_special_tokens).ids
        return ids


class FastEncoder(TextEncoder):
    """Encodes by kitoken until a text has other ids, which one in CHECK_INTERVAL shows."""

    def __init__(self, tokenizer: Any, encode_fast: Callable[[str, bool], list[int]]) -> None:
        super().__init__(tokenizer)
        self._encode_fast = encode_fast
        self._characters_max = FAST_CHARACTERS_MAX
        self._numbers = count(1)
        plain, whole = super().encode("x"), super().encode("x", add_special_tokens=True)
        starts = range(len(whole) - len(plain) + 1)
        start = next((at for at in starts if whole[at : at + len(plain)] == plain), 0)
        self._around = whole[:start], whole[start + len(plain) :]

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        if len(text) > self._characters_max:
            return super().encode(text, add_special_tokens=add_special_tokens)
        ids = self.encode_fast(text, add_special_tokens=add_special_tokens)
        if next(self._numbers) % CHECK_INTERVAL:
            return ids
        expected = super().encode(text, add_special_tokens=add_special_tokens)
        if ids != expected:
            self.differences += 1
            # From now on, every text is too long.
            self._characters_max = -1
            _LOG.error("kitoken gives a text of %d characters other ids: not used again", len(text))
        return expected

    def encode_fast(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The ids by kitoken."""
        ids = self._encode_fast(text, True)
        before, after = self._around
        return [*before, *ids, *after] if add_special_tokens and (before or after) else ids


def text_encoder(tokenizer: Any, description: Mapping[str, Any]) -> TextEncoder:
    """The encoder of a tokenizer. `description` is its tokenizer.json."""
    try:
        return _fast_encoder(tokenizer, description)
    except ValueError as error:
        _LOG.info("kitoken cannot encode for this model: %s", error)
        return TextEncoder(tokenizer)


def _fast_encoder(tokenizer: Any, description: Mapping[str, Any]) -> FastEncoder:
    """Raises ValueError where kitoken is not used."""
    if "merges" not in description.get("model", {}):
        # Of WordPiece, a text of one word took half a minute.
        raise ValueError("its model is not BPE")
    words = _with_words(description.get("pre_tokenizer"))
    fast = Kitoken.from_tokenizers(json.dumps({**description, "pre_tokenizer": words}).encode())
    hard = _HARD.search(str(fast.config()).replace(_SPACES_END.replace("\\", "\\\\"), ""))
    if hard is not None:
        raise ValueError(f"its regular expressions have {hard[0]}")
    encoder, reference = FastEncoder(tokenizer, fast.encode), TextEncoder(tokenizer)
    for text, special in product(_texts(description), (False, True)):
        ids = reference.encode(text, add_special_tokens=special)
        if encoder.encode_fast(text, add_special_tokens=special) != ids:
            raise ValueError(f"it gives {text[:40]!r} other ids")
    return encoder


def _with_words(pre_tokenizer: Any) -> Any:
    """States the words of ByteLevel by their regular expression. An added space would come too late."""
    if not pre_tokenizer or pre_tokenizer["type"] not in ("Sequence", "ByteLevel"):
        return pre_tokenizer
    pattern = {"Regex": _BYTE_LEVEL_WORDS}
    words = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    parts: list[dict[str, Any]] = []
    for part in pre_tokenizer.get("pretokenizers") or [pre_tokenizer]:
        stated = part["type"] == "ByteLevel" and part.get("use_regex", True)
        if stated and not part.get("add_prefix_space", True):
            parts += (words, {**part, "use_regex": False})
        else:
            parts.append(part)
    return {"type": "Sequence", "pretokenizers": parts}


def _texts(description: Mapping[str, Any]) -> Iterator[str]:
    """Texts of many kinds. Their beginnings and ends matter, and the spaces between their words."""
    yield from (_CORPUS, _CORPUS.replace("\n", "\r\n"), _CORPUS.replace(" ", "\t"))
    yield from _CORPUS.splitlines()
    added = [token["content"] for token in description.get("added_tokens") or []]
    yield "".join(f"{text}a {text} b\n{text}\n" for text in added[:_ADDED_TOKENS_MAX])


# A text with more characters for each token of the bound is counted in pieces first. English has four to five.
_CHARACTERS_PER_TOKEN = 6
_PIECE_CHARACTERS = 32_768
# Cutting a text changes the number of its tokens by a few at each cut.
_PIECES_SURPLUS = 1.25


def encode(tokenizer: Any, text: str, *, add_special_tokens: bool = False) -> Any:
    # `encode` keeps the global interpreter lock, and `encode_batch_fast` releases it.
    return tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]


def reject_far_too_long(tokenizer: Any, texts: Sequence[str], tokens_max: int | None) -> None:
    """Raises TooManyTokens as soon as the first pieces of long texts have far too many tokens."""
    if tokens_max is None:
        return
    if sum(map(len, texts)) <= max(_CHARACTERS_PER_TOKEN * tokens_max, 2 * _PIECE_CHARACTERS):
        return
    text = "\n".join(texts)
    count = 0
    for start in range(0, len(text), _PIECE_CHARACTERS):
        count += len(encode(tokenizer, text[start : start + _PIECE_CHARACTERS]))
        if count > _PIECES_SURPLUS * tokens_max + _PIECE_CHARACTERS:
            raise TooManyTokens


def check_count(count: int, tokens_max: int | None) -> None:
    """Raises TooManyTokens above the bound."""
    if tokens_max is not None and count > tokens_max:
        raise TooManyTokens(count)


def make_tokenizer(folder: Path, description: Mapping[str, Any]) -> Any:
    # Of several texts, tokenizers would encode each on a thread of their own pool.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        tokenizer = Tokenizer.from_str(json.dumps(description))
    except Exception as error:
        raise not_a_model(folder, f"has a tokenizer.json that cannot be read ({error})") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def not_a_model(folder: Path, why: str) -> ConfigError:
    return ConfigError(
        f"model folder {folder} {why}: "
        "set model to NAME=FOLDER with a folder that holds config.json and tokenizer.json",
        metadata={"folder": str(folder)},
    )
