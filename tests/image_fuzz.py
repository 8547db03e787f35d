"""Images as strangers send them: valid ones of all kinds, and broken ones."""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from io import BytesIO
from typing import Any, Final

from PIL import Image

from tests.image_models import png_chunk

_MODES: Final[Mapping[str, tuple[str, ...]]] = {
    "PNG": ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"),
    "JPEG": ("L", "RGB", "CMYK"),
    "WEBP": ("RGB", "RGBA"),
    "GIF": ("L", "P"),
}
_SIDES: Final = (0, 1, 2**13, 2**14 - 1, 2**16 - 1, 2**24 - 1, 2**31 - 1)


def fuzzed_images(count: int, seed: int = 1) -> Iterator[bytes]:
    """`count` files. A half has one change, or two."""
    rng = random.Random(seed)
    for _ in range(count):
        data = _image(rng)
        for _ in range(rng.choice((0, 0, 1, 2))):
            data = rng.choice(_CHANGES)(data, rng)
        yield data


def _image(rng: random.Random) -> bytes:
    form = rng.choice(tuple(_MODES))
    mode, size = rng.choice(_MODES[form]), (rng.randint(1, 60), rng.randint(1, 60))
    frames = [_pixels(mode, size, rng) for _ in range(rng.choice((1, 1, 3)))]
    options: dict[str, Any] = {}
    if rng.random() < 0.5:
        exif = Image.Exif()
        exif[0x0112] = rng.randint(0, 9)
        options["exif"] = exif.tobytes()
    if rng.random() < 0.2:
        options["xmp"] = b"<x/>"
    if form == "JPEG":
        options |= {"progressive": rng.random() < 0.5, "quality": rng.randint(1, 100)}
    elif form != "PNG" or mode in ("1", "L", "P", "RGB", "RGBA"):
        options |= {"save_all": True, "append_images": frames[1:]}
    if mode == "P" and rng.random() < 0.5:
        options["transparency"] = 3
    with BytesIO() as file:
        frames[0].save(file, form, **options)
        return file.getvalue()


def _pixels(mode: str, size: tuple[int, int], rng: random.Random) -> Image.Image:
    if mode == "I;16":
        return Image.frombytes(mode, size, rng.randbytes(2 * size[0] * size[1]))
    return Image.frombytes("RGB", size, rng.randbytes(3 * size[0] * size[1])).convert(mode)


def _cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _flipped(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randint(1, 8)):
        if changed:
            # Most faults in heads are found, those in pixels are not.
            changed[rng.randrange(min(len(changed), rng.choice((64, 10**9))))] = rng.randrange(256)
    return bytes(changed)


def _repeated(data: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(data) + 1)
    return data[:start] + data[start : start + rng.randint(1, 64)] * rng.randint(2, 2_000)


def _huge(data: bytes, rng: random.Random) -> bytes:
    """With other sides in its head."""
    width, height = rng.choice(_SIDES), rng.choice(_SIDES)
    if data.startswith(b"\x89PNG"):
        return (
            data[:8]
            + png_chunk(b"IHDR", struct.pack(">II", width, height) + data[24:29])
            + data[33:]
        )
    if data.startswith(b"GIF"):
        return data[:6] + struct.pack("<HH", width % 2**16, height % 2**16) + data[10:]
    if data.startswith(b"RIFF"):
        sides = b"".join((one % 2**24).to_bytes(3, "little") for one in (width, height))
        return data[:12] + b"VP8X\x0a\0\0\0\x08\0\0\0" + sides + data[12:]
    start = data.find(b"\xff\xc0") + 5
    return data[:start] + struct.pack(">HH", height % 2**16, width % 2**16) + data[start + 4 :]


def _unused(data: bytes, rng: random.Random) -> bytes:
    """With profiles, texts, comments or tables before its pixels."""
    count = rng.choice((1, 20, 400))
    if data.startswith(b"\x89PNG"):
        packed = zlib.compress(bytes(2**20))
        kind = rng.choice((b"iCCP", b"zTXt", b"iTXt", b"tEXt", b"acTL", b"eXIf", b"abCd"))
        return data[:33] + png_chunk(kind, b"x\0\0" + packed) * count + data[33:]
    if data.startswith(b"GIF"):
        start = 13 + (6 << (data[10] & 7) if data[10] & 0x80 else 0)
        return data[:start] + (b"\x21\xfe" + b"\1x" * 99 + b"\0") * count + data[start:]
    if data.startswith(b"RIFF"):
        return data + rng.choice((b"EXIF", b"XMP ", b"ICCP")) + struct.pack("<I", 9) + bytes(10)
    marker = bytes((0xFF, rng.choice((0xDB, 0xC4, 0xE1, 0xE2, 0xED, 0xEE, 0xFE))))
    content = rng.choice((b"Photoshop 3.0\0" + b"8BIM" * 99, b"Adobe\0d\0\0\0\0\0\2", bytes(99)))
    return data[:2] + (marker + struct.pack(">H", len(content) + 2) + content) * count + data[2:]


def _noise(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randint(0, 30)] + rng.randbytes(rng.randint(0, 300))


_CHANGES: Final[tuple[Callable[[bytes, random.Random], bytes], ...]] = (
    *(_cut, _flipped, _repeated, _huge, _unused, _noise),
)
