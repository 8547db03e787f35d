"""Settings of the sim engine, as its model name carries them."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from headrace_common.errors import ConfigError

if TYPE_CHECKING:
    from headrace_engine.factory import EngineConfig

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class SimSettings:
    """What a model named "sim:layers=4,heads=4" is like; each field may be given so.

    `head_bytes`: KV bytes of one head and token, a multiple of 8. `vocabulary`: token ids are below
    it. `context`: longest prompt and answer together. `prefill_s_per_token`: time of one prompt
    token over all layers. `decode_step_s`: time of one decode step over all layers. `layer_s`:
    added to every layer of every step.
    """

    layers: int = 2
    heads: int = 2
    head_bytes: int = 16
    vocabulary: int = 32000
    context: int = 8192
    prefill_s_per_token: float = 0.0
    decode_step_s: float = 0.0
    layer_s: float = 0.0


_BOUNDS = {
    "layers": (1, 512),
    "heads": (1, 1024),
    "head_bytes": (8, 65536),
    "vocabulary": (2, 1 << 31),
    "context": (2, 1 << 24),
    "prefill_s_per_token": (0, 60),
    "decode_step_s": (0, 60),
    "layer_s": (0, 60),
}


@dataclass(frozen=True, slots=True)
class SimShape:
    """Everything about a sim engine that is decided before it starts, validated."""

    settings: SimSettings
    tensor_parallel_size: int
    block_tokens: int
    block_count: int
    context_tokens: int
    max_requests: int
    max_batched_tokens: int


def parse_settings(model: str) -> SimSettings:
    """Reads "sim" or "sim:name=value,...". Raises ConfigError naming the wrong field."""
    name, _, text = model.partition(":")
    if name != "sim":
        raise _wrong("model", model, 'the sim engine takes "sim" or "sim:layers=4,heads=4"')
    values: dict[str, int | float] = {}
    kinds = {field.name: type(field.default) for field in fields(SimSettings)}
    for item in filter(None, text.split(",")):
        key, _, value = item.partition("=")
        if key not in kinds:
            raise _wrong(f"model.{key}", value, f"known settings are {', '.join(kinds)}")
        if key in values:
            raise _wrong(f"model.{key}", value, "give it once")
        values[key] = _number(key, value, kinds[key])
    settings = SimSettings(**values)  # type: ignore[arg-type]
    if settings.head_bytes % 8:
        raise _wrong("model.head_bytes", settings.head_bytes, "take a multiple of 8")
    return settings


def _number(key: str, text: str, kind: type) -> int | float:
    lowest, highest = _BOUNDS[key]
    try:
        value: int | float = kind(text)
    except ValueError as exc:
        raise _wrong(f"model.{key}", text, f"write a number ({kind.__name__})") from exc
    if not (math.isfinite(value) and lowest <= value <= highest):
        raise _wrong(f"model.{key}", text, f"take {lowest} to {highest}")
    return value


def plan_shape(config: EngineConfig) -> SimShape:
    """The engine that `config` asks for. Raises ConfigError naming the wrong field."""
    settings = parse_settings(config.model)
    ranks = config.tensor_parallel_size
    if ranks < 1 or (settings.heads % ranks and ranks % settings.heads):
        raise _wrong(
            "tensor_parallel_size", ranks, f"take a divisor or a multiple of {settings.heads} heads"
        )
    for field in ("block_tokens", "max_requests", "max_batched_tokens"):
        if getattr(config, field) < 1:
            raise _wrong(field, getattr(config, field), "take 1 or more")
    if config.max_batched_tokens < config.block_tokens:
        raise _wrong("max_batched_tokens", config.max_batched_tokens, "take block_tokens or more")
    if config.context_tokens < 0:
        raise _wrong("context_tokens", config.context_tokens, "take 0 or more")
    context = config.context_tokens or settings.context
    block_count = _block_count(config, settings, context)
    capacity = block_count * config.block_tokens
    if config.context_tokens > capacity:
        raise _wrong(
            "context_tokens",
            context,
            f"{block_count} blocks hold {capacity} tokens: take more blocks or less context",
        )
    return SimShape(
        settings=settings,
        tensor_parallel_size=ranks,
        block_tokens=config.block_tokens,
        block_count=block_count,
        context_tokens=min(context, capacity),
        max_requests=config.max_requests,
        max_batched_tokens=config.max_batched_tokens,
    )


def _block_count(config: EngineConfig, settings: SimSettings, context: int) -> int:
    if config.block_count < 0:
        raise _wrong("block_count", config.block_count, "take 0 or more")
    if config.block_count:
        return config.block_count
    heads = max(settings.heads, config.tensor_parallel_size)
    block_bytes = settings.layers * heads * settings.head_bytes * config.block_tokens
    affordable = int(config.kv_cache_gib * _GIB) // block_bytes
    if affordable < 1:
        raise _wrong("kv_cache_gib", config.kv_cache_gib, "it does not hold one block: take more")
    useful = config.max_requests * -(-context // config.block_tokens)
    return min(affordable, useful)


def _wrong(field: str, value: object, remedy: str) -> ConfigError:
    return ConfigError(
        f"{field} is {value!r}: {remedy}", metadata={"field": field, "value": str(value)}
    )
