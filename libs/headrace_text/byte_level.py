"""The text of tokens of byte-level tokenizers, which are spellings of bytes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

_REPLACEMENT: Final = "\ufffd"


def _letters() -> dict[str, int]:
    """The byte that each letter of a token stands for. Invisible characters have letters from U+0100 on."""
    visible = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
    others = [byte for byte in range(0x100) if byte not in visible]
    letters = {chr(byte): byte for byte in visible}
    return letters | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_OF: Final[Mapping[str, int]] = _letters()


def is_byte_level(description: Mapping[str, Any]) -> bool:
    """Whether a tokenizer joins the bytes of its tokens and does nothing else. `description` is its tokenizer.json."""
    return (description.get("decoder") or {}).get("type") == "ByteLevel"


class TokenBytes(dict[int, bytes]):
    """The bytes of each token, found when they are asked for first. A token that does not exist has none."""

    def __init__(self, text_of: Callable[[int], str | None], left_out: Collection[int]) -> None:
        """`text_of` gives the tokenizer's own text of a token. Those in `left_out` have no bytes."""
        super().__init__(dict.fromkeys(left_out, b""))
        self._text_of = text_of

    def __missing__(self, token_id: int) -> bytes:
        text = self._text_of(token_id)
        if text is None:
            return b""
        try:
            found = bytes(map(_BYTE_OF.__getitem__, text))
        except KeyError:
            # Added tokens are plain text.
            found = text.encode()
        self[token_id] = found
        return found


class ByteStep:
    """Takes the tokens of one text after a whole character. See TextCodec.decode_step."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._bytes_of = token_bytes.__getitem__
        self._held = b""
        """The bytes since the last text."""

    def __call__(self, tokens: int | list[int]) -> str | None:
        """The text that the tokens complete, or None while a character is incomplete."""
        if isinstance(tokens, int):
            data = self._held + self._bytes_of(tokens)
        else:
            data = self._held + b"".join(map(self._bytes_of, tokens))
        text = data.decode(errors="replace")
        if text.endswith(_REPLACEMENT):
            self._held = data
            return None
        self._held = b""
        return text
