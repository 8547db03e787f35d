"""The seal at the end of a stored block: a checksum of its bytes, bound to its name and to the deployment's key. Pure.

The store is shared and checks nothing. A block with changed bytes, of another key, or of another deployment has no
valid seal, and is not used.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import Final

from xxhash import xxh3_128_digest

SEAL_BYTES: Final = 64
_MAGIC: Final = b"HRBLOCK1"
# Magic, bytes of the content, checksum of the content. The tag follows.
_HEAD: Final = struct.Struct("<8sQ16s")
_TAG_BYTES: Final = SEAL_BYTES - _HEAD.size


def seal_of(secret: bytes, name: str, content: memoryview) -> bytes:
    """The seal of a block's content under its name."""
    head = _HEAD.pack(_MAGIC, len(content), xxh3_128_digest(content, _seed(secret)))
    tag = hashlib.blake2s(head + name.encode(), digest_size=_TAG_BYTES, key=secret).digest()
    return head + tag


def is_sealed(secret: bytes, name: str, content: memoryview, seal: bytes) -> bool:
    """Whether the content is what was stored under this name by a worker of the same deployment."""
    return hmac.compare_digest(seal_of(secret, name, content), seal)


def _seed(secret: bytes) -> int:
    return int.from_bytes(secret[:8], "little")
