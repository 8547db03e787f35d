"""Folders of models that take images, without weights, and files of images."""

from __future__ import annotations

import json
import struct
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any, Final

from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from headrace_text.hugging_face import _BYTE_OF

IMAGE: Final = 258
"""The placeholder for an image."""
_SPECIAL: Final = ("<|im_start|>", "<|im_end|>", "<|image|>", "<|vision_start|>", "<|vision_end|>")
_HEAD: Final = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
_TAIL: Final = (
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_PARTS: Final = (
    "{% for part in m.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image|><|vision_end|>"
    "{% elif part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
)
TEMPLATES: Final = {
    "texts": f"{_HEAD}{{{{ m.content + '' }}}}{_TAIL}",
    "both": f"{_HEAD}{{% if m.content is string %}}{{{{ m.content }}}}{{% else %}}{_PARTS}{{% endif %}}{_TAIL}",
    "lists": f"{_HEAD}{_PARTS}{_TAIL}",
}
"""Templates by the contents that they take."""
QWEN: Final[dict[str, Any]] = {
    "model_type": "qwen2_vl",
    "image_token_id": IMAGE,
    "vision_config": {"patch_size": 14, "spatial_merge_size": 2},
}
LLAVA: Final[dict[str, Any]] = {
    "model_type": "llava",
    "image_token_index": IMAGE,
    "vision_config": {"model_type": "clip_vision_model", "image_size": 112, "patch_size": 14},
}


def write_image_model(
    folder: Path, config: dict[str, Any] = QWEN, contents: str = "both", **processor: Any
) -> Path:
    """A model of bytes and control tokens. `contents` is a key of TEMPLATES."""
    # A token is the byte of its number, as in the simulated model.
    tokenizer = Tokenizer(models.BPE(vocab=dict(_BYTE_OF), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in _SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    whole = {"vocab_size": 320, "max_position_embeddings": 16_384, "eos_token_id": 257, **config}
    (folder / "config.json").write_text(json.dumps(whole))
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATES[contents]}))
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def image_file(
    width: int = 56, height: int = 56, form: str = "PNG", color: str = "red", **options: Any
) -> bytes:
    """A file with one color. `options` are Pillow's."""
    with BytesIO() as file:
        Image.new("RGB", (width, height), color).save(file, form, **options)
        return file.getvalue()


def png_chunk(kind: bytes, content: bytes = b"") -> bytes:
    """A part of a PNG."""
    checksum = struct.pack(">I", zlib.crc32(kind + content))
    return struct.pack(">I", len(content)) + kind + content + checksum


def png_head(width: int, height: int) -> bytes:
    """The start of a PNG of this size, up to its pixels."""
    size = struct.pack(">II", width, height)
    return image_file()[:8] + png_chunk(b"IHDR", size + image_file()[24:29])
