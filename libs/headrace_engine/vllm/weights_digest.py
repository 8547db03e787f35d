"""Distinguishes checkpoints of one shape, without reading all of their bytes."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

SAMPLED_TENSORS_MAX: Final = 1024
SAMPLE_BYTES: Final = 64
_HEADER_BYTES_MAX: Final = 100_000_000
_LENGTH: Final = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class _Tensor:
    """Bytes [start, end) of a file. `identity`: name, type and shape."""

    identity: str
    path: Path
    start: int
    end: int


def digest_of_weights(folder: Path) -> str:
    """SHA-256 of a checkpoint's tensor names, types and shapes, and of some bytes of up to 1,024 tensors.

    It does not depend on the number of files. Fine-tuned weights differ from their base in every sample of a changed
    tensor, up to chance. Files that are not of safetensors count by name, size and some bytes.
    Raises OSError for files that cannot be read, and ValueError for a safetensors file without a valid header.
    """
    tensors: list[_Tensor] = []
    for path in sorted(folder.glob("*.safetensors")):
        tensors.extend(_tensors_of(path))
    if not tensors:
        for path in sorted(folder.glob("*.bin")):
            size = path.stat().st_size
            tensors.append(_Tensor(f"{path.name}:{size}", path, 0, size))
    tensors.sort(key=lambda tensor: tensor.identity)
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.identity}\n".encode())
    for sample in _samples(tensors):
        digest.update(sample)
    return digest.hexdigest()


def digest_of_adapter(folder: Path) -> str:
    """SHA-256 of a LoRA adapter: of its weights, as above, and of its configuration. Raises the same errors."""
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    text = json.dumps(config, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(f"{digest_of_weights(folder)}\n{text}".encode()).hexdigest()


def _tensors_of(path: Path) -> Iterable[_Tensor]:
    """The tensors that a file's header lists. An empty file has none."""
    size = path.stat().st_size
    if not size:
        return
    with path.open("rb") as file:
        header_bytes = _LENGTH.unpack(file.read(_LENGTH.size).ljust(_LENGTH.size, b"\xff"))[0]
        first = _LENGTH.size + header_bytes
        if header_bytes > _HEADER_BYTES_MAX or first > size:
            raise ValueError(f"{path.name} has no header of safetensors")
        header: dict[str, Any] = json.loads(file.read(header_bytes))
    for name, entry in header.items():
        if name != "__metadata__":
            start, end = entry["data_offsets"]
            identity = f"{name}:{entry['dtype']}:{entry['shape']}"
            yield _Tensor(identity, path, first + start, min(first + end, size))


def _samples(tensors: list[_Tensor]) -> Iterable[bytes]:
    """Bytes from the middle of tensors, which are spread evenly over all."""
    count = min(len(tensors), SAMPLED_TENSORS_MAX)
    files: dict[Path, BinaryIO] = {}
    try:
        for number in range(count):
            tensor = tensors[number * len(tensors) // count]
            file = files.get(tensor.path)
            if file is None:
                file = files[tensor.path] = tensor.path.open("rb", buffering=0)
            middle = (tensor.start + tensor.end - SAMPLE_BYTES) // 2
            start = max(tensor.start, middle)
            length = min(SAMPLE_BYTES, tensor.end - start)
            yield os.pread(file.fileno(), length, start)
    finally:
        for file in files.values():
            file.close()
