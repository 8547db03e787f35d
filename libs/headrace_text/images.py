"""Images in prompts: their sizes, and how many placeholder tokens each becomes. No pixel is decoded.

Only the heads of files are read, in a bounded number of steps. Nothing is decompressed.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

IMAGE_PIXELS_MAX: Final = 64 * 1024 * 1024
"""Most pixels of one image."""
IMAGES_PIXELS_MAX: Final = 128 * 1024 * 1024
"""Most pixels of all images of one request. A worker has them all in memory, with four bytes or more for each."""
IMAGE_PARTS_MAX: Final = 16_384
"""Most parts, such as chunks, segments and blocks, up to the end of an image's metadata."""
_ORIENTATION: Final = 0x0112
# Orientations that exchange width and height.
_TURNED: Final = frozenset((5, 6, 7, 8))
_EXIF: Final = b"Exif\0\0"
# A list of tags is at the start, and has a step for each.
_EXIF_BYTES_MAX: Final = 65_536
# A chunk of a PNG has its length, type and checksum beside its content.
_PNG_CHUNK_BYTES: Final = 12
_JPEG_MARKER: Final = re.compile(rb"\xff([\x01-\xfe])")
_JPEG_SIZES: Final = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_JPEG_SCAN: Final = 0xDA
# Markers without a length, and the segments that no decoder of pixels needs.
_JPEG_BARE: Final = frozenset(range(0xD0, 0xDA))
_JPEG_UNUSED: Final = frozenset((0xFE, *range(0xE1, 0xF0))) - {0xEE}
_GIF_EXTENSION, _GIF_IMAGE, _GIF_CONTROL = 0x21, 0x2C, 0xF9
_ASPECT_RATIO_MAX: Final = 200

Config: TypeAlias = Mapping[str, Any]


class ImageRejected(Exception):
    """An image that a model cannot take. The message is the remedy."""


@dataclass(frozen=True, slots=True)
class ImageRule:
    """How a model takes images. The chat template writes one placeholder for each."""

    token_id: int
    """The placeholder."""
    token_text: str
    tokens_of: Callable[[int, int], int]
    """The number of placeholders in a prompt for an image of this width and height. Raises ImageRejected."""


def image_size(data: bytes) -> tuple[int, int]:
    """Width and height of an image as it is seen, so by its orientation. Raises ImageRejected."""
    head = _read_head(data)
    turned = _orientation(head.exif[:_EXIF_BYTES_MAX]) in _TURNED
    return (head.height, head.width) if turned else (head.width, head.height)


def without_unused_parts(data: bytes) -> bytes:
    """The file without texts, colour profiles and other parts that no pixel depends on. Raises ImageRejected.

    Decoders decompress such parts, or take a step for each.
    """
    return b"".join(data[part] for part in _read_head(data).kept)


class _Head(NamedTuple):
    """What the head of a file states. Pixels and orientation depend on the parts in `kept` only."""

    width: int
    height: int
    kept: list[slice]
    exif: bytes = b""


def _read_head(data: bytes) -> _Head:
    head = _Head(0, 0, [])
    try:
        for start, read in _READERS.items():
            if data.startswith(start):
                head = read(data, iter(range(IMAGE_PARTS_MAX)))
    except (struct.error, IndexError):
        # The end of the data.
        pass
    except StopIteration:
        raise ImageRejected(
            f"has metadata of more than {IMAGE_PARTS_MAX} parts; save it without metadata"
        ) from None
    if head.width * head.height == 0:
        raise ImageRejected(
            "is no image that can be read; send a whole file of PNG, JPEG, WebP or GIF"
        )
    if head.width * head.height > IMAGE_PIXELS_MAX:
        raise ImageRejected(
            f"has {head.width} times {head.height} pixels, and at most {IMAGE_PIXELS_MAX} are allowed; scale it down"
        )
    return head


def _read_png(data: bytes, steps: Iterator[int]) -> _Head:
    width, height = struct.unpack_from(">II", data, 16) if data[12:16] == b"IHDR" else (0, 0)
    position, exif, kept = 8, b"", [slice(8)]
    while position + _PNG_CHUNK_BYTES <= len(data):
        next(steps)
        kind = data[position + 4 : position + 8]
        end = position + _PNG_CHUNK_BYTES + int.from_bytes(data[position : position + 4])
        if kind == b"eXIf":
            exif = data[position + 8 : end - 4]
        # Chunks with a capital letter are needed, and one gives the transparency.
        if kind[0] < ord("a") or kind in (b"eXIf", b"tRNS"):
            kept.append(slice(position, end))
        position = end
    return _Head(width, height, kept, exif)


def _read_jpeg(data: bytes, steps: Iterator[int]) -> _Head:
    position, width, height, exif, kept = 0, 0, 0, b"", list[slice]()
    while found := _JPEG_MARKER.search(data, position):
        next(steps)
        marker, start = found[1][0], found.end()
        if marker == _JPEG_SCAN:
            kept.append(slice(start - 2, None))
            return _Head(width, height, kept, exif)
        if marker < 0xC0:
            break
        position = start
        if marker not in _JPEG_BARE:
            position += int.from_bytes(data[start : start + 2])
        content = data[start + 2 : position]
        if marker in _JPEG_SIZES:
            height, width = struct.unpack_from(">HH", content, 1)
        is_exif = marker == 0xE1 and content.startswith(_EXIF)
        if is_exif:
            exif = exif or content
        if is_exif or marker not in _JPEG_UNUSED:
            kept.append(slice(start - 2, position))
    return _Head(0, 0, kept)


def _read_webp(data: bytes, steps: Iterator[int]) -> _Head:
    width, height, exif = 0, 0, b""
    kind = data[8:16]
    if kind == b"WEBPVP8 ":
        width, height = (side & 0x3FFF for side in struct.unpack_from("<HH", data, 26))
    elif kind == b"WEBPVP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        width, height = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    elif kind == b"WEBPVP8X":
        width, height = (int.from_bytes(data[at : at + 3], "little") + 1 for at in (24, 27))
        position = 12
        # The head states whether there is Exif.
        while data[20] & 0x08 and not exif and position + 8 <= len(data):
            next(steps)
            (size,) = struct.unpack_from("<I", data, position + 4)
            if data[position : position + 4] == b"EXIF":
                exif = data[position + 8 : position + 8 + size]
            position += 8 + size + size % 2
    return _Head(width, height, [slice(None)], exif)


def _read_gif(data: bytes, steps: Iterator[int]) -> _Head:
    position = 13 + (6 << (data[10] & 7) if data[10] & 0x80 else 0)
    kept = [slice(position)]
    while (kind := data[position]) != _GIF_IMAGE:
        next(steps)
        start, position = position, position + 1
        if kind != _GIF_EXTENSION:
            continue
        position += 1
        while size := data[position]:
            next(steps)
            position += 1 + size
        position += 1
        if data[start + 1] == _GIF_CONTROL:
            kept.append(slice(start, position))
    kept.append(slice(position, None))
    # The first image may be larger than the screen.
    screen = struct.unpack_from("<HH", data, 6)
    image = struct.unpack_from("<4H", data, position + 1)
    return _Head(max(screen[0], image[0] + image[2]), max(screen[1], image[1] + image[3]), kept)


_READERS: Final[Mapping[bytes, Callable[[bytes, Iterator[int]], _Head]]] = {
    b"\x89PNG\r\n\x1a\n": _read_png,
    b"\xff\xd8\xff": _read_jpeg,
    b"RIFF": _read_webp,
    b"GIF87a": _read_gif,
    b"GIF89a": _read_gif,
}


def _orientation(exif: bytes) -> int:
    """The orientation in the first list of tags. 0 without one, and for what cannot be read."""
    exif = exif.removeprefix(_EXIF)
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(exif[:4], "")
    orientation = 0
    try:
        (start,) = struct.unpack_from(f"{order}I", exif, 4)
        (count,) = struct.unpack_from(f"{order}H", exif, start)
        for position in range(start + 2, start + 2 + 12 * count * bool(order), 12):
            tag, kind = struct.unpack_from(f"{order}HH", exif, position)
            if tag == _ORIENTATION and kind in (3, 4):
                (orientation,) = struct.unpack_from(f"{order}{' HI'[kind - 2]}", exif, position + 8)
    except struct.error:
        # Such as a list that ends early.
        pass
    return orientation


def image_rule(
    config: Config, processor: Config, token_text: Callable[[int], str | None]
) -> ImageRule | str:
    """The rule of a model, or why its images are refused. Empty for a model of text.

    `config` is its config.json, and `processor` the settings of its processor of images, as `processor_settings` reads
    them. `token_text` gives the text of a token.
    """
    kind = str(config.get("model_type") or "")
    family = _FAMILIES.get(kind)
    if family is None:
        takes_images = isinstance(config.get("vision_config"), dict)
        return f"images of model type {kind} are not supported" if takes_images else ""
    token_id = config.get("image_token_id", config.get("image_token_index", family.token_id))
    text = token_text(token_id)
    if text is None:
        return f"the tokenizer has no token {token_id}, which stands for an image"
    tokens_of = family.tokens_of(config.get("vision_config") or {}, config, processor)
    if tokens_of is None:
        return f"images of model type {kind} with these settings of its processor are not supported"
    return ImageRule(token_id, text, tokens_of)


def processor_settings(preprocessor_config: Config, processor_config: Config) -> Config:
    """The settings of the processor of images, which one of the two files has."""
    return processor_config.get("image_processor") or preprocessor_config


@dataclass(frozen=True, slots=True)
class _Family:
    """`token_id` is that of models without it in config.json."""

    token_id: int
    tokens_of: Callable[[Config, Config, Config], Callable[[int, int], int] | None]
    """From `vision_config`, the whole configuration, and the processor's settings. None for unsupported settings."""


def _resized_grid(
    vision: Config, config: Config, processor: Config
) -> Callable[[int, int], int] | None:
    """One token for each square of merged patches, of the image scaled to whole squares: Qwen-VL."""
    if processor.get("do_resize") is False:
        return None
    size = processor.get("size") or {}
    pixels_min = processor.get("min_pixels") or size.get("shortest_edge") or 56 * 56
    pixels_max = processor.get("max_pixels") or size.get("longest_edge") or 28 * 28 * 1280
    patch = processor.get("patch_size") or vision.get("patch_size") or 14
    factor = patch * (processor.get("merge_size") or vision.get("spatial_merge_size") or 2)

    def tokens_of(width: int, height: int) -> int:
        if max(width, height) > _ASPECT_RATIO_MAX * min(width, height):
            raise ImageRejected(
                f"has {width} times {height} pixels, and one side may be {_ASPECT_RATIO_MAX} times the other; cut it"
            )
        # The order of operations is that of the processor, since rounding shows it.
        rows, columns = round(height / factor), round(width / factor)
        if rows * factor * columns * factor > pixels_max:
            scale = math.sqrt((height * width) / pixels_max)
            rows = max(1, math.floor(height / scale / factor))
            columns = max(1, math.floor(width / scale / factor))
        elif rows * factor * columns * factor < pixels_min:
            scale = math.sqrt(pixels_min / (height * width))
            rows = math.ceil(height * scale / factor)
            columns = math.ceil(width * scale / factor)
        return rows * columns

    return tokens_of


def _fixed_grid(
    vision: Config, config: Config, processor: Config
) -> Callable[[int, int], int] | None:
    """As many tokens as the vision model has patches, whatever the image: LLaVA 1.5."""
    kind = vision.get("model_type", "clip_vision_model")
    # Other vision models, such as Pixtral's, have grids of another kind.
    if kind not in ("clip_vision_model", "siglip_vision_model"):
        return None
    patches = (vision.get("image_size", 336) // vision.get("patch_size", 14)) ** 2
    # CLIP has one token for the whole image before the patches. The default leaves out the first one.
    whole = kind == "clip_vision_model"
    dropped = config.get("vision_feature_select_strategy", "default") == "default"
    count = patches + whole - dropped
    return lambda width, height: count


_QWEN: Final = _Family(151_655, _resized_grid)
_FAMILIES: Final[Mapping[str, _Family]] = {
    "qwen2_vl": _QWEN,
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": _QWEN,
    "qwen3_vl_moe": _QWEN,
    "llava": _Family(32_000, _fixed_grid),
}
