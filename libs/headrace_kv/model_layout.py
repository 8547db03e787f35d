"""The KV cache that a model's config.json leads to, and the bytes that a prompt has of it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from headrace_common.errors import ConfigError
from headrace_kv.layout import STATE, TOKENS, CacheGroup, KvLayout, Part

_BLOCK_TOKENS: Final = 16
DTYPE_BYTES: Final[Mapping[str, int]] = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The fields of a config.json: its language model's, where it has several. Errors name the field."""

    fields: Mapping[str, Any]

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> ModelConfig:
        """That of a whole config.json."""
        return cls({**content, **cls(content).nested("text_config")})

    def nested(self, name: str) -> Mapping[str, Any]:
        """The object in this field, empty without one. Raises ConfigError."""
        found = self.fields.get(name) or {}
        if not isinstance(found, dict):
            raise ConfigError(f"config.json: {name} is {found}; it must be an object")
        return found

    def count(self, *names: str, default: int | None = None) -> int:
        """The first of these fields that has a value: a whole number from 1. Raises ConfigError."""
        values = [(name, self.fields[name]) for name in names if self.fields.get(name)]
        if not values and default is not None:
            return default
        name, value = values[0] if values else (names[0], "missing")
        if type(value) is not int or not 0 < value < 1 << 40:
            raise ConfigError(f"config.json: {name} is {value}; it must be a whole number from 1")
        return value

    @property
    def name(self) -> str:
        """The kind of the model."""
        return str(self.fields.get("model_type", "model"))

    @property
    def dtype(self) -> str:
        """The element type of weights that are not quantized."""
        return str(self.fields.get("dtype") or self.fields.get("torch_dtype") or "bfloat16")

    @property
    def heads(self) -> int:
        """Attention heads."""
        return self.count("num_attention_heads", "num_heads")

    @property
    def kv_heads(self) -> int:
        """KV heads. All ranks have the single one of latent attention."""
        return 1 if self.is_latent else self.count("num_key_value_heads", default=self.heads)

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.count("head_dim", default=self.count("hidden_size") // self.heads or None)

    @property
    def is_latent(self) -> bool:
        """Whether its attention is latent, as in DeepSeek's models."""
        return bool(self.fields.get("kv_lora_rank"))

    @property
    def layer_types(self) -> Sequence[str]:
        """The kind of each layer. Raises ConfigError where it is not known."""
        count, stated = self.count("num_hidden_layers"), self.fields.get("layer_types")
        slides = self.fields.get("sliding_window") and self.fields.get("use_sliding_window", True)
        if stated:
            kinds = stated if isinstance(stated, list) else []
        elif every := self.count("sliding_window_pattern", default=0):
            kinds = [_FULL if (layer + 1) % every == 0 else _WINDOW for layer in range(count)]
        elif self.name in _STATES or not (slides or _UNKNOWN & self.fields.keys()):
            kinds = [self.name if self.name in _STATES else _FULL] * count
        else:
            kinds = [_WINDOW if self.name in _ALL_SLIDE else ""] * count
        known = (_FULL, _WINDOW, _CHUNK, *_STATES)
        if len(kinds) != count or not all(one in known for one in kinds):
            raise ConfigError(
                f"config.json: layer_types must name the kind of each layer, of {', '.join(known)}"
            )
        return tuple(kinds)


_FULL, _WINDOW, _CHUNK = "full_attention", "sliding_attention", "chunked_attention"
_ALL_SLIDE: Final = ("mistral", "mixtral", "phi3")
_UNKNOWN: Final = {
    *("hybrid_override_pattern", "layers_block_type", "attn_layer_indices"),
    "attention_chunk_size",
}


def kv_layout(config: ModelConfig, tensor_parallel_size: int = 1) -> KvLayout:
    """The layout of a model's workers, with KV of its own type. Raises ConfigError where its cache is not known."""
    if config.dtype not in DTYPE_BYTES:
        raise ConfigError(f"config.json: dtype is {config.dtype}; known: {', '.join(DTYPE_BYTES)}")
    kinds = config.layer_types
    groups = [
        _group(config, kind, tuple(layer for layer, one in enumerate(kinds) if one == kind))
        for kind in sorted(set(kinds))
    ]
    groups.sort(key=lambda group: (group.kind == STATE, group.is_windowed))
    return KvLayout(config.name, tensor_parallel_size, tuple(groups))


def prompt_bytes(layout: KvLayout, tokens: int) -> int:
    """The bytes that a worker without a cached prefix gets of a prompt: one copy, without tokens outside of windows."""
    return sum(
        len(group.layers)
        * group.bytes_between(group.first_sent_token(0, tokens), tokens, group.head_count)
        for group in layout.groups
    )


def _group(config: ModelConfig, kind: str, layers: tuple[int, ...]) -> CacheGroup:
    size = DTYPE_BYTES[config.dtype]
    if kind in _STATES:
        part = Part("state", config.dtype, _STATES[kind](config, size))
        return CacheGroup(kind, layers, STATE, 1, 0, (part,))
    latent = config.is_latent and config.count("kv_lora_rank") + config.count("qk_rope_head_dim")
    parts = (Part("kv", config.dtype, size * (latent or 2 * config.head_dim)),)
    window = config.count("sliding_window") if kind == _WINDOW else 0
    chunk = config.count("attention_chunk_size") if kind == _CHUNK else 0
    return CacheGroup(kind, layers, TOKENS, config.kv_heads, _BLOCK_TOKENS, parts, window, chunk)


def _convolution(config: ModelConfig, size: int) -> int:
    return size * config.count("conv_dim", "hidden_size") * (config.count("conv_L_cache") - 1)


def _mamba2(config: ModelConfig, size: int) -> int:
    heads, width, state = map(config.count, ("num_heads", "head_dim", "state_size"))
    channels = heads * width + 2 * config.count("n_groups") * state
    return size * (heads * width * state + channels * (config.count("conv_kernel") - 1))


def _delta_net(config: ModelConfig, size: int) -> int:
    keys, values = (
        (config.count(f"linear_num_{one}_heads"), config.count(f"linear_{one}_head_dim"))
        for one in ("key", "value")
    )
    channels = 2 * keys[0] * keys[1] + values[0] * values[1]
    last = size * channels * (config.count("linear_conv_kernel_dim") - 1)
    # The recurrent state is in float32.
    return 4 * values[0] * values[1] * keys[1] + last


_STATES: Final[Mapping[str, Callable[[ModelConfig, int], int]]] = {
    "conv": _convolution,
    "mamba2": _mamba2,
    "linear_attention": _delta_net,
}
"""The bytes of one layer's state by the kind of the layer, with so many bytes for an element."""
