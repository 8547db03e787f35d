"""Writes a model directory in the Hugging Face layout, without torch and in one atomic step."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer

FloatArray = NDArray[np.float32]
WEIGHTS_FILE = "model.safetensors"
CHAT_TURNS = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """Yields an empty directory beside `target`, which becomes `target` only if the block succeeds.

    So a reader never finds an incomplete model, and an interrupted run leaves no files.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield building
        building.chmod(0o755)
        shutil.rmtree(target, ignore_errors=True)
        building.rename(target)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def is_complete(target: Path) -> bool:
    """Whether `target` has a complete model, made with `new_directory`."""
    return all(
        (target / name).is_file() for name in ("config.json", "tokenizer.json", WEIGHTS_FILE)
    )


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_weights(directory: Path, tensors: Mapping[str, FloatArray], *, dtype: str) -> int:
    """Writes float32 arrays as safetensors of `dtype` ("F32" or "BF16") and returns the size in bytes.

    The format is a little-endian 64-bit header length, a JSON header padded to 8 bytes, the data.
    """
    encode = {"F32": _float32_bytes, "BF16": _bfloat16_bytes}[dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    blobs: list[bytes] = []
    offset_bytes = 0
    for name, array in tensors.items():
        blobs.append(encode(array))
        end_bytes = offset_bytes + len(blobs[-1])
        header[name] = {
            "dtype": dtype,
            "shape": list(array.shape),
            "data_offsets": [offset_bytes, end_bytes],
        }
        offset_bytes = end_bytes
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    path = directory / WEIGHTS_FILE
    with path.open("wb") as sink:
        sink.write(len(head).to_bytes(8, "little") + head)
        sink.writelines(blobs)
    return path.stat().st_size


def _float32_bytes(array: FloatArray) -> bytes:
    return np.ascontiguousarray(array, dtype=np.float32).tobytes()


def _bfloat16_bytes(array: FloatArray) -> bytes:
    bits = np.ascontiguousarray(array, dtype=np.float32).view(np.uint32)
    nearest_even = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return ((bits + nearest_even) >> np.uint32(16)).astype(np.uint16).tobytes()


def write_tokenizer(
    directory: Path,
    tokenizer: Tokenizer,
    *,
    special_tokens: list[str],
    chat_template: str,
    max_length_tokens: int,
) -> None:
    """Writes tokenizer.json and its config. <|im_end|> ends a turn and is the EOS token."""
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special_tokens]
    )
    tokenizer.save(os.fspath(directory / "tokenizer.json"))
    write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "pad_token": "<|im_end|>",
            "unk_token": "<|endoftext|>",
            "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": max_length_tokens,
            "chat_template": chat_template,
        },
    )


def write_generation_config(directory: Path, tokenizer: Tokenizer) -> None:
    eos_token_id = tokenizer.token_to_id("<|im_end|>")
    write_json(
        directory / "generation_config.json",
        {
            "bos_token_id": tokenizer.token_to_id("<|im_start|>"),
            "eos_token_id": eos_token_id,
            "pad_token_id": eos_token_id,
        },
    )
