"""Images in data: URLs. Pure."""

from __future__ import annotations

import binascii
from typing import Final
from urllib.parse import unquote_to_bytes

_SCHEME: Final = "data:"
# Some clients name no type of their images, or a wrong one.
_OTHER_TYPES: Final = ("audio/", "video/", "text/", "application/pdf")
_HEAD_CHARACTERS_MAX: Final = 256
# Some 0.3 ms. A multiple of four characters, which are three bytes.
_PIECE_CHARACTERS: Final = 65_536


def is_data_url(url: str) -> bool:
    """Whether the URL contains the file itself."""
    return url[: len(_SCHEME)].lower() == _SCHEME


def data_of(url: str) -> bytes:
    """The file in a data: URL. Raises ValueError with "url: remedy"."""
    head, comma, _ = url[:_HEAD_CHARACTERS_MAX].partition(",")
    media_type, *options = head[len(_SCHEME) :].lower().split(";")
    if not comma or "base64" not in options:
        raise ValueError("url: must be data:image/...;base64, and the file in base64")
    if media_type.startswith(_OTHER_TYPES):
        raise ValueError(f"url: {media_type[:64]!r} is not supported; send an image")
    content = url[url.index(",") + 1 :]
    try:
        data = _decoded(unquote_to_bytes(content) if "%" in content else content.encode("ascii"))
    except ValueError:
        data = b""
    if not data:
        raise ValueError("url: has no file in base64 after the comma")
    return data


def _decoded(content: bytes) -> bytes:
    """In pieces, since each keeps the global interpreter lock."""
    if any(space in content for space in (b"\n", b"\r", b" ")):
        content = content.translate(None, b"\n\r ")
    return b"".join(
        binascii.a2b_base64(content[start : start + _PIECE_CHARACTERS])
        for start in range(0, len(content), _PIECE_CHARACTERS)
    )
