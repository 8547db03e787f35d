"""Properties of a model that its folder shows without loading it, such as which checkpoint it has."""

from __future__ import annotations

import hashlib
import json
import operator
import os
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np

from headrace_common.errors import ConfigError
from headrace_common.registry.adapters import ADAPTERS_MAX
from headrace_text.model_hub import MODEL_FILES, fetch_model, parse_hub_model

SAMPLED_TENSORS_MAX: Final = 1024
SAMPLE_BYTES: Final = 64
_HEADER_BYTES_MAX: Final = 16_000_000
_LENGTH: Final = struct.Struct("<Q")
_PART_BYTES: Final = 4 * 1024 * 1024
# By type in safetensors: words, and the exponent of infinities and of what is no number.
_EXPONENTS: Final = {
    "F64": ("<u8", 0x7FF0 << 48),
    "F32": ("<u4", 0x7F80 << 16),
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
}
_MODULE: Final = re.compile(r"(?:.*\.)?layers\.(\d+\..+)\.[^.]+")
_LORA_WEIGHT: Final = re.compile(r"(?:.*\.)?layers\.(\d+\..+)\.lora_([AB])\.weight")


@dataclass(frozen=True, slots=True)
class _Tensor:
    """Bytes [start, end) of a file. Without a type, it is a whole file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    start: int
    end: int

    @property
    def identity(self) -> str:
        """Name, type and shape."""
        return f"{self.name}:{self.dtype}:{list(self.shape)}" if self.dtype else self.name


def digest_of_weights(folder: Path) -> str:
    """SHA-256 of a checkpoint's tensor names, types and shapes, and of some bytes of up to 1,024 tensors.

    It does not depend on the number of files. Fine-tuned weights differ from their base in every sample of a changed
    tensor, up to chance. Files that are not of safetensors count by name, size and some bytes.
    Raises OSError for files that cannot be read, and ValueError for a safetensors file without a valid header.
    """
    tensors = _tensors_in(folder)
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.identity}\n".encode())
    for sample in _samples(tensors):
        digest.update(sample)
    return digest.hexdigest()


def adapter_config(folder: Path) -> dict[str, Any]:
    """The configuration of a LoRA adapter. Raises OSError, or ValueError for a file that holds no object."""
    return _object((folder / "adapter_config.json").read_bytes(), "adapter_config.json")


def digest_of_adapter(folder: Path) -> str:
    """SHA-256 of a LoRA adapter: of all bytes of its weights, and of its configuration. Kept until a file changes.

    Raises OSError, and ValueError for files that are no adapter, or with values that are no numbers.
    """
    return _digest_of_files(folder, _stamps(folder))


def _stamps(folder: Path) -> tuple[tuple[str, int, int, int], ...]:
    found = ((one.name, one.stat()) for one in sorted(folder.iterdir()))
    return tuple((name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in found)


@lru_cache(maxsize=2 * ADAPTERS_MAX)
def _digest_of_files(folder: Path, stamps: tuple[tuple[str, int, int, int], ...]) -> str:
    text = json.dumps(adapter_config(folder), sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode())
    for tensor in _tensors_in(folder):
        digest.update(f"\n{tensor.identity}\n".encode())
        word, exponent = _EXPONENTS.get(tensor.dtype, ("", 0))
        with tensor.path.open("rb") as file:
            file.seek(tensor.start)
            while part := file.read(min(_PART_BYTES, tensor.end - file.tell())):
                digest.update(part)
                if word and bool(((np.frombuffer(part, word) & exponent) == exponent).any()):
                    raise ValueError(f"{tensor.name} has values that are no numbers")
    if _stamps(folder) != stamps:
        raise ValueError("its files have changed while they were read")
    return digest.hexdigest()


def require_modules(adapter: Path, model: Path) -> None:
    """Raises ValueError for a LoRA weight of a layer that names no module of the model, or has another shape.

    Experts, and models that store no modules by layer, are not checked.
    """
    shapes: dict[str, set[tuple[int, ...]]] = {}
    for tensor in _tensors_in(model):
        if found := _MODULE.fullmatch(tensor.name):
            known = shapes.setdefault(found[1], set())
            # A quantized matrix may have any shape, and so may its scales.
            if tensor.name.endswith(".weight") and tensor.dtype in _EXPONENTS:
                known.add(tensor.shape)
    for tensor in _tensors_in(adapter) if shapes else ():
        found = _LORA_WEIGHT.fullmatch(tensor.name)
        if found is None or ".experts" in tensor.name:
            continue
        if found[1] not in shapes:
            raise ValueError(f"the model has no module for {tensor.name}")
        # A is [rank, input], and B is [output, rank]. The matrix of the module is [output, input].
        side = 1 if found[2] == "A" else 0
        wanted = {shape[side] for shape in shapes[found[1]]}
        if wanted and (len(tensor.shape) != 2 or tensor.shape[side] not in wanted):
            raise ValueError(f"{tensor.name} has shape {list(tensor.shape)}, and the model another")


def _tensors_in(folder: Path) -> list[_Tensor]:
    """Those of all files of weights, by identity. Raises OSError and ValueError."""
    tensors: list[_Tensor] = []
    for path in sorted(folder.glob("*.safetensors")):
        tensors.extend(_tensors_of(path))
    if not tensors:
        for path in sorted(folder.glob("*.bin")):
            size = path.stat().st_size
            tensors.append(_Tensor(f"{path.name}:{size}", "", (), path, 0, size))
    return sorted(tensors, key=lambda tensor: tensor.identity)


def _object(text: bytes, what: str) -> dict[str, Any]:
    """A JSON object. Raises ValueError."""
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError(f"{what} is nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError(f"{what} holds no object")
    return found


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
        header = _object(file.read(header_bytes), f"the header of {path.name}")
    for name, entry in header.items():
        if name != "__metadata__":
            start, end = (min(first + operator.index(at), size) for at in entry["data_offsets"])
            shape = tuple(map(operator.index, entry["shape"]))
            if not first <= start <= end:
                raise ValueError(f"{path.name} has no bytes for {name}")
            yield _Tensor(name, str(entry["dtype"]), shape, path, start, end)


def _samples(tensors: list[_Tensor]) -> Iterable[bytes]:
    """Bytes from the middle of tensors, which are spread evenly over all."""
    count = min(len(tensors), SAMPLED_TENSORS_MAX)
    for number in range(count):
        tensor = tensors[number * len(tensors) // count]
        start = max(tensor.start, (tensor.start + tensor.end - SAMPLE_BYTES) // 2)
        with tensor.path.open("rb", buffering=0) as file:
            yield os.pread(file.fileno(), min(SAMPLE_BYTES, tensor.end - start), start)


# Fields of config.json about how a model is stored or run. They do not change what it computes.
INCIDENTAL_FIELDS = frozenset(
    {"_name_or_path", "dtype", "torch_dtype", "transformers_version", "use_cache"}
)
DIGEST_HEX_LENGTH = 12


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """`fingerprint`: the model's identity for KvLayout.model, "name:digest of config.json".

    A model of a hub has the commit in its name. For another folder, a digest of the weights follows, after a dot, and
    the first digest covers the processing of images too.
    `max_model_len`: the longest context that the model was made for, 0 when config.json does not state it.
    `model_type`: as in config.json. `has_tokenizer`: whether it has a tokenizer, which structured outputs need.
    `has_latent_attention`: whether its attention is multi-head latent attention (MLA).
    """

    path: Path
    fingerprint: str
    max_model_len: int
    model_type: str
    has_tokenizer: bool = True
    has_latent_attention: bool = False


def read_model_folder(model: str, max_model_len: int) -> ModelFolder:
    """Checks a folder in the Hugging Face layout. `max_model_len`: the context to serve, 0 for the model's own.

    A model on a hub ("hf:OWNER/NAME") is downloaded first. Raises ConfigError with one line that names the remedy.
    """
    hub_model = parse_hub_model(model)
    path = Path(model) if hub_model is None else fetch_model(hub_model, MODEL_FILES)
    if not model or (model.partition(":")[0] == "sim" and not path.is_dir()):
        raise _wrong(
            model,
            f"engine is vllm, and model is {model!r}: set model to a folder in the Hugging Face layout (`make model` "
            "prepares a small one), or engine to sim",
        )
    if not path.is_dir():
        raise _wrong(
            model,
            f"model folder {model} does not exist: name a folder with config.json and *.safetensors",
        )
    config = _read_json(path, "config.json")
    if not isinstance(config.get("architectures"), list):
        raise _wrong(
            model,
            f"{path / 'config.json'} names no architectures: name the folder of a language model",
        )
    if not any(path.glob("*.safetensors")) and not any(path.glob("*.bin")):
        raise _wrong(
            model,
            f"model folder {model} holds no weights: put the *.safetensors files beside config.json",
        )
    longest = _longest_context(config)
    if longest and max_model_len > longest:
        raise ConfigError(
            f"max_model_len is {max_model_len}, but {path.name} was made for {longest}: "
            f"ask for {longest} or less, or for 0 to take the model's own",
            metadata={"field": "max_model_len", "model": model},
        )
    # The folder of a downloaded model has the name of its commit.
    if hub_model is None:
        identity = config | _image_processing(path)
        fingerprint = f"{path.resolve().name}:{digest_of(identity)}.{_weights_digest(path)}"
    else:
        fingerprint = f"{hub_model.name}@{path.name}:{digest_of(config)}"
    model_type = str(config.get("model_type", ""))
    return ModelFolder(
        path,
        fingerprint,
        longest,
        model_type,
        has_tokenizer=(path / "tokenizer.json").is_file(),
        has_latent_attention=bool(config.get("kv_lora_rank")),
    )


def _weights_digest(path: Path) -> str:
    try:
        return digest_of_weights(path)[:DIGEST_HEX_LENGTH]
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise _wrong(
            str(path), f"cannot read the weights in {path} ({exc}): fetch the model again"
        ) from exc


def _image_processing(path: Path) -> dict[str, Any]:
    """How images become pixels of the model, which their KV depends on. Empty for a model without images."""
    names = ("preprocessor_config.json", "processor_config.json")
    return {name: _read_json(path, name) for name in names if (path / name).is_file()}


def _read_json(path: Path, name: str) -> dict[str, Any]:
    file = path / name
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise _wrong(
            str(path),
            f"{path} is not a model: it has no {name}; name a folder in the Hugging Face layout",
        ) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as exc:
        raise _wrong(str(path), f"cannot read {file} ({exc}): fetch the model again") from exc
    if not isinstance(config, dict):
        raise _wrong(str(path), f"{file} holds no object: fetch the model again")
    return config


def _longest_context(config: Mapping[str, Any]) -> int:
    text = config.get("text_config")
    value = (text if isinstance(text, dict) else config).get("max_position_embeddings", 0)
    return value if isinstance(value, int) else 0


def digest_of(config: Mapping[str, Any]) -> str:
    """Identity of a model, from the fields of its config.json that determine what it computes."""
    identity = {name: value for name, value in config.items() if name not in INCIDENTAL_FIELDS}
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_HEX_LENGTH]


def _wrong(model: str, detail: str) -> ConfigError:
    return ConfigError(detail, metadata={"field": "model", "model": model})
