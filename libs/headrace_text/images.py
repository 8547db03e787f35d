"""Images in prompts: their sizes, and how many placeholder tokens each becomes. No pixel is decoded."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import Any, Final, TypeAlias

IMAGE_PIXELS_MAX: Final = 64 * 1024 * 1024
"""Most pixels of one image."""
_FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF")
_ORIENTATION: Final = 0x0112
# Orientations that exchange width and height.
_TURNED: Final = frozenset((5, 6, 7, 8))
_PNG_HEAD: Final = b"\x89PNG\r\n\x1a\n"
_PNG_LATE: Final = frozenset((b"eXIf", b"iTXt", b"tEXt", b"zTXt"))
# A chunk of a PNG has its length, type and checksum beside its content.
_PNG_CHUNK_BYTES: Final = 12
_PNG_CHUNKS_MAX: Final = 65_536
_READS_MAX: Final = 8_192
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
    # Most processes see no image.
    from PIL import Image

    try:
        with Image.open(_Head(_with_late_chunks_first(data)), formats=_FORMATS) as image:
            width, height = image.size
            # The method of a PNG would decode the pixels to find metadata behind them.
            turned = _is_turned(lambda: Image.Image.getexif(image))
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise ImageRejected(f"has more than {IMAGE_PIXELS_MAX} pixels; scale it down") from None
    except Exception:  # noqa: BLE001 - a parser's errors for broken files are of many types
        raise ImageRejected(
            "is no image that can be read; send a whole file of PNG, JPEG, WebP or GIF"
        ) from None
    if width * height > IMAGE_PIXELS_MAX:
        raise ImageRejected(
            f"has {width} times {height} pixels, and at most {IMAGE_PIXELS_MAX} are allowed; scale it down"
        )
    return (height, width) if turned else (width, height)


class _Head(BytesIO):
    """A file for a parser, which takes a step for each of its reads. A head in very many pieces is refused."""

    _reads_left = _READS_MAX

    def read(self, size: int | None = -1, /) -> bytes:
        self._reads_left -= 1
        if self._reads_left < 0:
            raise ValueError("a head in very many pieces")
        return super().read(size)


def _is_turned(read_exif: Callable[[], Mapping[int, Any]]) -> bool:
    """As vLLM finds it, which ignores metadata that cannot be read."""
    try:
        return read_exif().get(_ORIENTATION, 1) in _TURNED
    except Exception:  # noqa: BLE001 - see image_size
        return False


def _with_late_chunks_first(data: bytes) -> bytes:
    """A PNG with the metadata that stands behind its pixels before them. Other data as it is."""
    if not data.startswith(_PNG_HEAD):
        return data
    late: list[bytes] = []
    position, pixels_start = len(_PNG_HEAD), 0
    for _ in range(_PNG_CHUNKS_MAX):
        if position + _PNG_CHUNK_BYTES > len(data):
            break
        kind = data[position + 4 : position + 8]
        end = position + _PNG_CHUNK_BYTES + int.from_bytes(data[position : position + 4])
        if kind == b"IDAT":
            pixels_start = pixels_start or position
        elif pixels_start and kind in _PNG_LATE:
            late.append(data[position:end])
        position = end
    return b"".join((data[:pixels_start], *late, data[pixels_start:])) if late else data


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
