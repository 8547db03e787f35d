"""The KV cache that a model's config.json leads to, and the bytes that a prompt has of it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

from headrace_common.errors import ConfigError
from headrace_kv.layout import STATE, TOKEN_OUTER, TOKENS, CacheGroup, KvLayout, Part

_BLOCK_TOKENS: Final = 16
_LAYERS_MAX: Final = 10_000
DTYPE_BYTES: Final[Mapping[str, int]] = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}
_FULL: Final = ("full_attention", "attention")
_WINDOWED: Final = ("sliding_attention", "chunked_attention")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The fields of a config.json. Its language model's, where it has several. Errors name the field."""

    fields: Mapping[str, Any]

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> ModelConfig:
        """That of a whole config.json."""
        text = content.get("text_config")
        if not isinstance(text, dict):
            return cls(content)
        outer = {name: content[name] for name in _OUTER if name in content}
        return cls({**outer, **text})

    def count(self, *names: str, default: int | None = None) -> int:
        """The first of these fields that is there: a whole number from 1. Raises ConfigError."""
        for name in names:
            value = self.fields.get(name)
            if value is None or (value == 0 and default is not None):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 40:
                raise ConfigError(f"config.json: {name} is {value!r}, not a whole number from 1")
            return value
        if default is None:
            raise ConfigError(f"config.json has no {names[0]}: name the config.json of a decoder")
        return default

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
        default = max(1, self.count("hidden_size") // self.heads)
        return self.count("head_dim", default=default)

    @property
    def is_latent(self) -> bool:
        """Whether its attention is latent, as in DeepSeek's models."""
        return bool(self.fields.get("kv_lora_rank"))

    @property
    def layer_types(self) -> tuple[str, ...]:
        """The kind of each layer. Raises ConfigError for one whose cache is not known."""
        count = self.count("num_hidden_layers")
        if count > _LAYERS_MAX:
            raise ConfigError(f"config.json: num_hidden_layers is more than {_LAYERS_MAX}")
        stated = self.fields.get("layer_types")
        if stated is None and self.fields.get("sliding_window_pattern"):
            period = self.count("sliding_window_pattern")
            stated = [_WINDOWED[0] if (layer + 1) % period else _FULL[0] for layer in range(count)]
        if stated is None:
            return (self._kind_of_all(),) * count
        known = (*_FULL, *_WINDOWED, *_STATES)
        if not isinstance(stated, list) or len(stated) != count:
            raise ConfigError(f"config.json: layer_types must list {count} layers")
        unknown = sorted({str(one) for one in stated} - set(known))
        if unknown:
            raise ConfigError(
                f"config.json: layer_types has {unknown[0]}; known are {', '.join(known)}"
            )
        return tuple(stated)

    def _kind_of_all(self) -> str:
        if self.name in _STATES:
            return self.name
        foreign = sorted(_FOREIGN & self.fields.keys())
        if foreign:
            raise ConfigError(f"config.json: layers by {foreign[0]} are not known: add layer_types")
        slides = self.fields.get("sliding_window") and self.fields.get("use_sliding_window", True)
        if slides and self.name not in _ALL_SLIDE:
            raise ConfigError("config.json: sliding_window without layer_types: add these")
        return "sliding_attention" if slides else "full_attention"


_OUTER: Final = ("dtype", "torch_dtype", "quantization_config")
_FOREIGN: Final = {
    "hybrid_override_pattern",
    "layers_block_type",
    "attn_layer_indices",
    "attention_chunk_size",
}
_ALL_SLIDE: Final = ("mistral", "mixtral", "phi3")


def kv_layout(config: ModelConfig, *, tensor_parallel_size: int = 1, dtype: str = "") -> KvLayout:
    """The layout of a model's workers in blocks of 16 tokens. `dtype`: of the KV, that of the model if empty.

    Raises ConfigError for a model with a cache that is not known.
    """
    dtype = dtype or config.dtype
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"KV of type {dtype} is not known; known are {', '.join(DTYPE_BYTES)}")
    kinds = config.layer_types
    groups = [
        _group(config, kind, [layer for _, layer in numbered], DTYPE_BYTES[dtype], dtype)
        for kind, numbered in groupby(
            sorted((kind, layer) for layer, kind in enumerate(kinds)), key=lambda one: one[0]
        )
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


def _group(
    config: ModelConfig, kind: str, layers: list[int], element_bytes: int, dtype: str
) -> CacheGroup:
    if kind in _STATES:
        part = Part("state", dtype, element_bytes * _STATES[kind](config))
        return CacheGroup(kind, tuple(layers), STATE, 1, 0, (part,))
    if config.is_latent:
        elements = config.count("kv_lora_rank") + config.count("qk_rope_head_dim")
    else:
        elements = 2 * config.head_dim
    part = Part("kv", dtype, element_bytes * elements, TOKEN_OUTER)
    window = config.count("sliding_window") if kind == "sliding_attention" else 0
    chunk = config.count("attention_chunk_size") if kind == "chunked_attention" else 0
    heads = config.kv_heads
    return CacheGroup(kind, tuple(layers), TOKENS, heads, _BLOCK_TOKENS, (part,), window, chunk)


def _convolution(config: ModelConfig) -> int:
    return config.count("conv_dim", "hidden_size") * (config.count("conv_L_cache") - 1)


def _mamba2(config: ModelConfig) -> int:
    heads, width = config.count("num_heads"), config.count("head_dim")
    state = config.count("state_size")
    channels = heads * width + 2 * config.count("n_groups") * state
    return heads * width * state + channels * (config.count("conv_kernel") - 1)


def _delta_net(config: ModelConfig) -> int:
    keys, values = (
        (config.count(f"linear_num_{one}_heads"), config.count(f"linear_{one}_head_dim"))
        for one in ("key", "value")
    )
    channels = 2 * keys[0] * keys[1] + values[0] * values[1]
    kernel = config.count("linear_conv_kernel_dim")
    return values[0] * values[1] * keys[1] + channels * (kernel - 1)


_STATES: Final[Mapping[str, Callable[[ModelConfig], int]]] = {
    "conv": _convolution,
    "mamba2": _mamba2,
    "linear_attention": _delta_net,
}
"""The elements of one layer's state, by the kind of the layer."""
