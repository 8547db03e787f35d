"""Settings of the sim engine, which are part of its model name."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Final, Literal, TypeAlias

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from headrace_common.config import problem_text
from headrace_common.errors import ConfigError
from headrace_common.limits import DEFAULT_KV_CACHE_GIB
from headrace_common.registry.adapters import Adapter, adapter_to_proto, announced_violations
from headrace_kv.layout import STATE, TOKEN_OUTER, TOKENS, CacheGroup, GroupKind, Part
from headrace_kv.shard_map import HEAD_OUTER, TOKENS_OUTER, Dimension, heads_held

if TYPE_CHECKING:
    from headrace_engine.config import EngineConfig

_GIB = 1 << 30
BLOCK_TOKENS = 32
_ORDERS: dict[str, tuple[Dimension, ...]] = {"hnd": HEAD_OUTER, "nhd": TOKENS_OUTER}
_INDEX_PARTS = (Part("key", "uint8", 16), Part("key_scale", "float32", 4))
_PART_BYTES_MAX = 65536
TOKEN_INNER: Final = "token_inner"
"""An opaque block_format: tokens are the innermost dimension, so no token is contiguous."""


def word_of(part: Part) -> np.dtype[np.unsignedinteger]:
    """The widest unsigned integer that divides a part."""
    return np.dtype(f"u{math.gcd(8, part.unit_bytes)}")


def with_blocks(cache: CacheGroup, block_tokens: int, block_format: str) -> CacheGroup:
    """The group of a worker with blocks of `block_tokens`. A state ignores both arguments."""
    if cache.kind == STATE:
        return cache
    tokens = 1 if block_format == TOKEN_OUTER else block_tokens
    parts = tuple(
        replace(part, unit_bytes=part.unit_bytes * tokens, block_format=block_format)
        for part in cache.parts
    )
    return replace(cache, block_tokens=block_tokens, parts=parts)


def spread_caches(
    kinds: Sequence[tuple[str, GroupKind, int, int, tuple[Part, ...]]],
) -> tuple[CacheGroup, ...]:
    """Caches of (name, kind, layer count, heads, parts), with the layers of all kinds alternating evenly.

    Kinds without layers are omitted.
    """
    turns = sorted(
        ((2 * index + 1) / count, number)
        for number, (_, _, count, _, _) in enumerate(kinds)
        for index in range(count)
    )
    return tuple(
        CacheGroup(
            name,
            tuple(layer for layer, (_, owner) in enumerate(turns) if owner == number),
            kind,
            heads,
            0 if kind == STATE else 1,
            parts,
        )
        for number, (name, kind, count, heads, parts) in enumerate(kinds)
        if count
    )


def _parts(text: str) -> tuple[Part, ...]:
    found: list[Part] = []
    for item in text.split("/"):
        name, _, rest = item.partition(":")
        nbytes, _, dtype = rest.partition(":")
        if not name.isidentifier() or not (dtype or "uint8").isidentifier():
            raise ValueError('write parts as "name:bytes" or "name:bytes:dtype", with "/" between')
        if not nbytes.isdecimal() or not 0 < int(nbytes) <= _PART_BYTES_MAX:
            raise ValueError(f"take 1 to {_PART_BYTES_MAX} bytes")
        found.append(Part(name, dtype or "uint8", int(nbytes)))
    if len({part.name for part in found}) < len(found):
        raise ValueError("name every part differently")
    return tuple(found)


def _order(text: str) -> tuple[Dimension, ...]:
    names = {str(dimension): dimension for dimension in HEAD_OUTER}
    order = _ORDERS.get(text)
    if order is None and sorted(text.split("/")) == sorted(names):
        order = tuple(names[name] for name in text.split("/"))
    if order is None:
        raise ValueError(f'take hnd, nhd or the dimensions in any order, as in "{"/".join(names)}"')
    return order


def _adapters(text: str) -> tuple[Adapter, ...]:
    found: list[Adapter] = []
    for item in text.split("/"):
        name, _, digest = item.partition(":")
        found.append(Adapter(name, digest or hashlib.sha256(name.encode()).hexdigest()[:16]))
    violations = announced_violations([adapter_to_proto(one) for one in found], "adapters")
    if violations:
        named = "; ".join(f"{path}: {remedy}" for path, remedy in violations.items())
        raise ValueError(f'write "NAME" or "NAME:DIGEST", with "/" between: {named}')
    return tuple(found)


_LayerCount: TypeAlias = Annotated[int, Field(ge=0, le=512)]
_HeadCount: TypeAlias = Annotated[int, Field(ge=1, le=1024)]
_Seconds: TypeAlias = Annotated[float, Field(ge=0, le=60)]
_Parts: TypeAlias = Annotated[tuple[Part, ...], BeforeValidator(_parts)]


class SimSettings(BaseModel):
    """The settings that a model named "sim:layers=4,heads=4" gives; each field may be given so.

    The model:
    - `layers`, `heads`: of attention. One head is replicated on every rank, as in MLA.
    - `head_bytes`: KV bytes of one head and token, a multiple of 8.
    - `vocabulary`: token ids are below it.
    - `context`: most tokens of prompt and answer together.
    - `prefill_s_per_token`: seconds of one prompt token over all layers.
    - `decode_step_s`: seconds of one decode step over all layers.
    - `layer_s`: seconds added to every layer of every step.
    - `parts`: arrays of attention's cache instead of one of head_bytes. Each is "name:bytes" or
      "name:bytes:dtype" for one head and token, as in "k:16:int8/v:16:int8/scale:4:float32".
    - `index_layers`: layers of a second cache with blocks of its own, such as a sparse attention's
      index, with one head.
    - `state_layers`: layers that keep one page per request, such as convolution and SSM states, with
      `state_heads` and `state_parts`.

    Layers of all three kinds alternate evenly.

    The worker; prefill and decode may differ in these:
    - `order`: the dimensions of a block: "hnd", "nhd", or all from the outermost to the innermost, as
      in "block/layer/part/head/token".
    - `block_format`: "token_outer", or "token_inner" for blocks that can only be copied whole. Both
      sides need the same one.
    - `index_block_tokens`: tokens of one block of the index; 0 for block_tokens.
    - `adapters`: LoRA adapters, as in "poet/coder:0a1b". Each changes all KV and answers. After ":" a name may have a
      digest in hex, another than its own. Adapters of one name and other digests differ.

    Both sides need the same one:
    - `verify`: "on", or "off" for measurements of everything but the simulation. With "off", KV memory is transferred
      but neither written nor read: answers depend on the tokens alone, and no wrong byte is found.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    layers: Annotated[int, Field(ge=1, le=512)] = 2
    heads: _HeadCount = 2
    head_bytes: Annotated[int, Field(ge=8, le=_PART_BYTES_MAX, multiple_of=8)] = 16
    vocabulary: Annotated[int, Field(ge=2, le=1 << 31)] = 32000
    context: Annotated[int, Field(ge=2, le=1 << 24)] = 8192
    prefill_s_per_token: _Seconds = 0.0
    decode_step_s: _Seconds = 0.0
    layer_s: _Seconds = 0.0
    parts: _Parts = ()
    index_layers: _LayerCount = 0
    state_layers: _LayerCount = 0
    state_heads: _HeadCount = 2
    state_parts: _Parts = (Part("conv", "uint8", 24), Part("ssm", "uint8", 64))
    order: Annotated[tuple[Dimension, ...], BeforeValidator(_order)] = HEAD_OUTER
    block_format: Literal["token_outer", "token_inner"] = TOKEN_OUTER
    index_block_tokens: Annotated[int, Field(ge=0, le=1 << 20)] = 0
    verify: bool = True
    adapters: Annotated[tuple[Adapter, ...], BeforeValidator(_adapters)] = ()

    @cached_property
    def caches(self) -> tuple[CacheGroup, ...]:
        """The model's caches, attention first."""
        attention = self.parts or (Part("kv", "uint8", self.head_bytes),)
        return spread_caches(
            (
                ("attention", TOKENS, self.layers, self.heads, attention),
                ("index", TOKENS, self.index_layers, 1, _INDEX_PARTS),
                ("state", STATE, self.state_layers, self.state_heads, self.state_parts),
            )
        )

    @property
    def layer_count(self) -> int:
        """Cache layers of every kind."""
        return self.layers + self.index_layers + self.state_layers


@dataclass(frozen=True)
class SimShape:
    """The validated configuration of a sim engine.

    `groups[i]` has `block_counts[i]` blocks. `block_tokens` is of the first group. Each of the `stages` has
    `tensor_parallel_size` ranks.
    """

    settings: SimSettings
    tensor_parallel_size: int
    block_tokens: int
    block_count: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    stages: int = 1

    @cached_property
    def groups(self) -> tuple[CacheGroup, ...]:
        """The worker's cache groups, attention first."""
        sizes = {"index": self.settings.index_block_tokens or self.block_tokens}
        return tuple(
            with_blocks(cache, sizes.get(cache.name, self.block_tokens), self.settings.block_format)
            for cache in self.settings.caches
        )

    @cached_property
    def span_tokens(self) -> int:
        """The fewest tokens that fill whole blocks of every group."""
        return math.lcm(*(group.block_tokens for group in self.groups if group.kind == TOKENS))

    @property
    def block_counts(self) -> tuple[int, ...]:
        """Blocks of each group: for as many tokens as in the first group, or one page per request."""
        tokens = self.block_count * self.block_tokens
        return tuple(
            self.max_num_seqs if group.kind == STATE else -(-tokens // group.block_tokens)
            for group in self.groups
        )

    @property
    def stage_starts(self) -> tuple[int, ...]:
        """The first layer of each pipeline stage."""
        return tuple(
            stage * self.settings.layer_count // self.stages for stage in range(self.stages)
        )


_Fault = tuple[str, object, str]
"""A wrong field, its value, and the remedy."""


def parse_settings(model: str) -> SimSettings:
    """Reads "sim" or "sim:name=value,...". Raises ConfigError naming every wrong field."""
    name, _, text = model.partition(":")
    if name != "sim":
        raise _config_error(
            [("model", model, 'the sim engine takes "sim" or "sim:layers=4,heads=4"')]
        )
    items = (item.partition("=") for item in filter(None, text.split(",")))
    try:
        return SimSettings.model_validate({key: value for key, _, value in items})
    except ValidationError as exc:
        raise _config_error(
            [(f"model.{one['loc'][0]}", one["input"], problem_text(one)) for one in exc.errors()]
        ) from exc


def plan_shape(config: EngineConfig) -> SimShape:
    """The engine that `config` describes. Raises ConfigError naming every wrong field."""
    settings = parse_settings(config.model)
    block_tokens = config.block_size or BLOCK_TOKENS
    context = config.max_model_len or settings.context
    block_count = config.num_gpu_blocks_override or _affordable_blocks(
        config, settings, block_tokens, context
    )
    capacity = block_count * block_tokens
    shape = SimShape(
        settings=settings,
        tensor_parallel_size=config.tensor_parallel_size,
        block_tokens=block_tokens,
        block_count=block_count,
        max_model_len=min(context, capacity),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        stages=config.pipeline_parallel_size,
    )
    faults: list[_Fault] = []
    if shape.stages > settings.layer_count:
        remedy = f"take 1 to {settings.layer_count}, the number of layers"
        faults.append(("pipeline_parallel_size", shape.stages, remedy))
    if config.max_num_batched_tokens < shape.span_tokens:
        remedy = f"take {shape.span_tokens}, which fill whole blocks, or more"
        faults.append(("max_num_batched_tokens", config.max_num_batched_tokens, remedy))
    if config.max_model_len > capacity:
        remedy = f"{block_count} blocks hold {capacity} tokens: take more blocks or less context"
        faults.append(("max_model_len", context, remedy))
    if faults:
        raise _config_error(faults)
    return shape


def _affordable_blocks(
    config: EngineConfig, settings: SimSettings, block_tokens: int, context: int
) -> int:
    """As many blocks as fit into memory and requests can use."""
    ranks = config.tensor_parallel_size
    token_bytes = page_bytes = 0
    for cache in settings.caches:
        heads = sum(len(heads_held(rank, ranks, cache.head_count)) for rank in range(ranks))
        nbytes = len(cache.layers) * cache.bytes_between(0, 1, heads)
        if cache.kind == STATE:
            page_bytes += nbytes
        else:
            token_bytes += nbytes
    memory_bytes = int((config.kv_cache_gib or DEFAULT_KV_CACHE_GIB) * _GIB)
    affordable = (memory_bytes - config.max_num_seqs * page_bytes) // (token_bytes * block_tokens)
    if affordable < 1:
        remedy = "it does not hold one block: take more"
        raise _config_error([("kv_cache_gib", config.kv_cache_gib, remedy)])
    return min(affordable, config.max_num_seqs * -(-context // block_tokens))


def _config_error(faults: list[_Fault]) -> ConfigError:
    return ConfigError(
        "; ".join(f"{field} is {value!r}: {remedy}" for field, value, remedy in faults),
        metadata={
            "field": ", ".join(field for field, _, _ in faults),
            "value": ", ".join(str(value) for _, value, _ in faults),
        },
    )
