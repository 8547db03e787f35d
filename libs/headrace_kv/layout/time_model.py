"""How many bytes of KV a prompt has, and how long they should take over a link. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from headrace_common.errors import ConfigError

EFFICIENCY: Final = 0.9
"""Share of a link's bandwidth that one transfer is expected to reach."""

_DTYPE_BYTES: Final = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "half": 2,
    "float": 4,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
}
DTYPES: Final = tuple(sorted(_DTYPE_BYTES))
"""Element types that `kv_shape` accepts."""
_NUMBER_MAX: Final = 1 << 24


@dataclass(frozen=True, slots=True)
class KvShape:
    """The KV of one token, in all layers. `attention` is "mla" or "gqa"."""

    attention: str
    layer_count: int
    layer_bytes: int
    dtype: str

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers."""
        return self.layer_count * self.layer_bytes


def mla_layer_bytes(kv_lora_rank: int, rope_dim: int, dtype_bytes: int) -> int:
    """Bytes of one token in one layer: one latent vector and the rotated part of the key."""
    return (kv_lora_rank + rope_dim) * dtype_bytes


def gqa_layer_bytes(kv_heads: int, head_dim: int, dtype_bytes: int) -> int:
    """Bytes of one token in one layer: a key and a value of each head."""
    return 2 * kv_heads * head_dim * dtype_bytes


def transfer_s(payload_bytes: int, gbit_per_s: float) -> float:
    """Seconds that the bytes should take over a link of 10^9 * `gbit_per_s` bits per second."""
    return payload_bytes * 8 / (gbit_per_s * 1e9 * EFFICIENCY)


def exposed_s(moved_s: float, layer_count: int, computed_s: float | None) -> float:
    """Seconds of a transfer after the last layer was computed.

    Each layer is sent while later ones are computed, so at least the last layer's share is exposed. A transfer that is
    slower than computing keeps the link busy from the end of the first layer. None for `computed_s` hides the most.
    """
    last_s = moved_s / layer_count
    if computed_s is None:
        return last_s
    return max(last_s, moved_s - computed_s * (layer_count - 1) / layer_count)


def kv_shape(config: Mapping[str, Any], dtype: str = "") -> KvShape:
    """The shape of a model from its config.json. `dtype` replaces the model's own element type.

    Raises ConfigError that names the field. Layers without attention, which have a state of a fixed size, do not count.
    """
    inner = config.get("text_config")
    if isinstance(inner, Mapping):
        config = {**config, **inner}
    name = dtype or _text(config, "torch_dtype") or _text(config, "dtype") or "bfloat16"
    dtype_bytes = _DTYPE_BYTES.get(name)
    if dtype_bytes is None:
        raise ConfigError(f"dtype {name}: choose one of {', '.join(DTYPES)}")
    layers = _layer_count(config)
    if config.get("kv_lora_rank") is not None:
        rank, rope = _number(config, "kv_lora_rank"), _number(config, "qk_rope_head_dim")
        return KvShape("mla", layers, mla_layer_bytes(rank, rope, dtype_bytes), name)
    heads = _number(config, "num_attention_heads")
    kv_heads = heads
    if config.get("num_key_value_heads") is not None:
        kv_heads = _number(config, "num_key_value_heads")
    if config.get("head_dim") is not None:
        head_dim = _number(config, "head_dim")
    else:
        head_dim = _number(config, "hidden_size") // heads
    return KvShape("gqa", layers, gqa_layer_bytes(kv_heads, head_dim, dtype_bytes), name)


def _layer_count(config: Mapping[str, Any]) -> int:
    """Layers with attention."""
    kinds = config.get("layer_types")
    if not isinstance(kinds, list):
        return _number(config, "num_hidden_layers")
    count = len([kind for kind in kinds if "attention" in str(kind) and kind != "linear_attention"])
    if not count:
        raise ConfigError("config.json: layer_types has no layer with attention")
    return count


def _text(config: Mapping[str, Any], field: str) -> str:
    value = config.get(field)
    return value.removeprefix("torch.") if isinstance(value, str) else ""


def _number(config: Mapping[str, Any], field: str) -> int:
    value: object = config.get(field)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= _NUMBER_MAX:
        raise ConfigError(f"config.json: {field} must be a whole number above 0")
    return value
