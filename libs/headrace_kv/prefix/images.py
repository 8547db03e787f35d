"""Images in prompt hashes: token ids in which each placeholder of an image is a word from the image's content. Pure.

So hashes of blocks with placeholders differ between images, and those after them too. Word `i` of an image is number
`i mod 4` of the little-endian u32 numbers in its content hash, combined with `i` by exclusive or. Its top bit is set,
so that it equals no token id.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from hashlib import sha256
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from headrace_common.errors import InternalError

if TYPE_CHECKING:
    from headrace_kv.prefix.hashing import TokenIds

CONTENT_HASH_BYTES: Final = 16
_NO_TOKEN_ID: Final = np.uint32(1 << 31)


class ImageSpan(Protocol):
    """Placeholders of one image in token ids, such as a PromptImage."""

    @property
    def content_hash(self) -> bytes:
        """16 bytes."""

    @property
    def start_token(self) -> int:
        """Position of the first placeholder."""

    @property
    def token_count(self) -> int:
        """Number of placeholders."""


def content_hash(data: bytes) -> bytes:
    """The content hash of an image file: the first 16 bytes of its SHA-256."""
    return sha256(data).digest()[:CONTENT_HASH_BYTES]


def placeholder_words(image_hash: bytes, first: int, count: int) -> array[int]:
    """The words of `count` placeholders of an image, from its placeholder number `first`."""
    if len(image_hash) != CONTENT_HASH_BYTES:
        raise InternalError(f"a content hash of {len(image_hash)} bytes")
    numbers = np.arange(first, first + count, dtype=np.uint32)
    words = np.frombuffer(image_hash, "<u4")[numbers % 4] ^ numbers | _NO_TOKEN_ID
    return array("I", words.tobytes())


def whole_images_end(end_token: int, images: Iterable[ImageSpan], block_tokens: int = 1) -> int:
    """The tokens of the most whole blocks, up to `end_token`, that contain no image in part."""
    end = end_token - end_token % block_tokens
    for image in reversed(tuple(images)):
        if image.start_token < end < image.start_token + image.token_count:
            end = image.start_token - image.start_token % block_tokens
    return end


def hashed_token_ids(token_ids: TokenIds, images: Iterable[ImageSpan]) -> array[int]:
    """The token ids to hash for prefixes. Images must lie within the token ids. Raises InternalError otherwise."""
    words = array("I")
    if isinstance(token_ids, (list, tuple)):
        words.extend(token_ids)
    else:
        words.frombytes(np.frombuffer(token_ids, "<u4").tobytes())
    for image in images:
        end = image.start_token + image.token_count
        if end > len(words):
            raise InternalError(f"an image to token {end} of a prompt of {len(words)} tokens")
        words[image.start_token : end] = placeholder_words(image.content_hash, 0, image.token_count)
    return words
