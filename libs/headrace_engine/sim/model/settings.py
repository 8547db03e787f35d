"""Settings of the sim engine, which are part of its model name."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from headrace_common.errors import ConfigError
from headrace_common.limits import DEFAULT_KV_CACHE_GIB
from headrace_common.registry.adapters import Adapter, adapter_to_proto, announced_violations
from headrace_engine.sim.model.caches import TOKEN_INNER, SimCache, SimPart, spread_caches
from headrace_kv.layout import STATE, TOKEN_OUTER, TOKENS, CacheGroup
from headrace_kv.shard_map import HEAD_OUTER, TOKENS_OUTER, Dimension, heads_held

if TYPE_CHECKING:
    from headrace_engine.config import EngineConfig

_GIB = 1 << 30
BLOCK_TOKENS = 32
_ORDERS: dict[str, tuple[Dimension, ...]] = {"hnd": HEAD_OUTER, "nhd": TOKENS_OUTER}


@dataclass(frozen=True)
class SimSettings:
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
      index, with `index_heads` and `index_parts`.
    - `state_layers`: layers that keep one page per request, such as convolution and SSM states, with
      `state_heads` and `state_parts`.

    Layers of all three kinds alternate evenly.

    The worker; prefill and decode may differ in these:
    - `order`: the dimensions of a block: "hnd", "nhd", or all from the outermost to the innermost, as
      in "block/layer/part/head/token".
    - `block_format`: "token_outer", or "token_inner" for blocks that can only be copied whole. Both
      sides need the same one.
    - `index_block_tokens`: tokens of one block of the index; 0 for block_tokens.
    - `stages`: pipeline stages, each with tensor_parallel_size ranks.
    - `host_blocks`: evicted blocks that are kept in main memory, of a model with attention only.
    - `disk_blocks`: blocks that main memory has evicted and that are kept in a file in /var/tmp.
    - `host_copy_s_per_token`: seconds that copying them back takes.
    - `adapters`: LoRA adapters, as in "poet/coder:0a1b". Each changes all KV and answers. After ":" a name may have a
      digest in hex, another than its own. Adapters of one name and other digests differ.

    Both sides need the same one:
    - `verify`: "on", or "off" for measurements of everything but the simulation. With "off", KV memory is transferred
      but neither written nor read: answers depend on the tokens alone, and no wrong byte is found.
    """

    layers: int = 2
    heads: int = 2
    head_bytes: int = 16
    vocabulary: int = 32000
    context: int = 8192
    prefill_s_per_token: float = 0.0
    decode_step_s: float = 0.0
    layer_s: float = 0.0
    parts: tuple[SimPart, ...] = ()
    index_layers: int = 0
    index_heads: int = 1
    index_parts: tuple[SimPart, ...] = (SimPart("key", 16), SimPart("key_scale", 4, "float32"))
    state_layers: int = 0
    state_heads: int = 2
    state_parts: tuple[SimPart, ...] = (SimPart("conv", 24), SimPart("ssm", 64))
    order: tuple[Dimension, ...] = HEAD_OUTER
    block_format: str = TOKEN_OUTER
    index_block_tokens: int = 0
    stages: int = 1
    host_blocks: int = 0
    disk_blocks: int = 0
    host_copy_s_per_token: float = 0.0
    verify: bool = True
    adapters: tuple[Adapter, ...] = ()

    @cached_property
    def caches(self) -> tuple[SimCache, ...]:
        """The model's caches, attention first."""
        attention = self.parts or (SimPart("kv", self.head_bytes),)
        return spread_caches(
            (
                ("attention", TOKENS, self.layers, self.heads, attention),
                ("index", TOKENS, self.index_layers, self.index_heads, self.index_parts),
                ("state", STATE, self.state_layers, self.state_heads, self.state_parts),
            )
        )

    @property
    def layer_count(self) -> int:
        """Cache layers of every kind."""
        return self.layers + self.index_layers + self.state_layers


_BOUNDS = {
    "layers": (1, 512),
    "heads": (1, 1024),
    "head_bytes": (8, 65536),
    "vocabulary": (2, 1 << 31),
    "context": (2, 1 << 24),
    "prefill_s_per_token": (0, 60),
    "decode_step_s": (0, 60),
    "layer_s": (0, 60),
    "index_layers": (0, 512),
    "index_heads": (1, 1024),
    "state_layers": (0, 512),
    "state_heads": (1, 1024),
    "index_block_tokens": (0, 1 << 20),
    "stages": (1, 512),
    "host_blocks": (0, 1 << 24),
    "disk_blocks": (0, 1 << 24),
    "host_copy_s_per_token": (0, 60),
}
_PART_BYTES = (1, 65536)


@dataclass(frozen=True)
class SimShape:
    """The validated configuration of a sim engine.

    `groups[i]` has `block_counts[i]` blocks. `block_tokens` is of the first group.
    """

    settings: SimSettings
    tensor_parallel_size: int
    block_tokens: int
    block_count: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int

    @cached_property
    def groups(self) -> tuple[CacheGroup, ...]:
        """The worker's cache groups, attention first."""
        sizes = {"index": self.settings.index_block_tokens or self.block_tokens}
        return tuple(
            cache.group(sizes.get(cache.name, self.block_tokens), self.settings.block_format)
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
        stages = self.settings.stages
        return tuple(stage * self.settings.layer_count // stages for stage in range(stages))


_Fault = tuple[str, object, str]
"""A wrong field, its value, and the remedy."""


def parse_settings(model: str) -> SimSettings:
    """Reads "sim" or "sim:name=value,...". Raises ConfigError naming every wrong field."""
    name, _, text = model.partition(":")
    if name != "sim":
        raise _config_error(
            [("model", model, 'the sim engine takes "sim" or "sim:layers=4,heads=4"')]
        )
    values: dict[str, Any] = {}
    faults: list[_Fault] = []
    kinds = {field.name: type(field.default) for field in fields(SimSettings)}
    for item in filter(None, text.split(",")):
        key, _, value = item.partition("=")
        if key not in kinds:
            faults.append((f"model.{key}", value, f"known settings are {', '.join(kinds)}"))
        elif key in values:
            faults.append((f"model.{key}", value, "give it once"))
        else:
            values[key] = None
            try:
                values[key] = _read(key, value, kinds[key])
            except ValueError as exc:
                faults.append((f"model.{key}", value, str(exc)))
    if not faults:
        faults += _contradictions(values)
    if faults:
        raise _config_error(faults)
    return SimSettings(**values)


def _contradictions(values: dict[str, Any]) -> list[_Fault]:
    """Values that contradict each other, though each is valid by itself."""
    faults: list[_Fault] = []
    settings = SimSettings(**values)
    if settings.head_bytes % 8:
        faults.append(("model.head_bytes", settings.head_bytes, "take a multiple of 8"))
    if "head_bytes" in values and settings.parts:
        faults.append(("model.head_bytes", settings.head_bytes, "omit it: parts give the sizes"))
    if settings.host_blocks and (settings.index_layers or settings.state_layers):
        remedy = "omit it: index_layers and state_layers cannot be kept in main memory"
        faults.append(("model.host_blocks", settings.host_blocks, remedy))
    if settings.disk_blocks and not settings.host_blocks:
        remedy = "set host_blocks too: blocks reach the disk from main memory"
        faults.append(("model.disk_blocks", settings.disk_blocks, remedy))
    if settings.stages > settings.layer_count:
        remedy = f"take 1 to {settings.layer_count}, the number of layers"
        faults.append(("model.stages", settings.stages, remedy))
    return faults


def _read(key: str, text: str, kind: type) -> object:
    """A setting's value. Raises ValueError with the remedy."""
    readers: dict[str, Callable[[str], object]] = {
        "order": _order,
        "block_format": _parse_block_format,
        "verify": _parse_switch,
        "adapters": _parse_adapters,
    }
    if key in readers:
        return readers[key](text)
    if kind is tuple:
        return _parts(text)
    return _number(text, kind, _BOUNDS[key])


def _number(text: str, kind: type, bounds: tuple[int, int]) -> int | float:
    lowest, highest = bounds
    try:
        value: int | float = kind(text)
    except ValueError as exc:
        raise ValueError(f"write a number ({kind.__name__})") from exc
    if not (math.isfinite(value) and lowest <= value <= highest):
        raise ValueError(f"take {lowest} to {highest}")
    return value


def _parts(text: str) -> tuple[SimPart, ...]:
    found: list[SimPart] = []
    for item in text.split("/"):
        name, _, rest = item.partition(":")
        nbytes, _, dtype = rest.partition(":")
        if not name.isidentifier() or not (dtype or "uint8").isidentifier():
            raise ValueError('write parts as "name:bytes" or "name:bytes:dtype", with "/" between')
        found.append(SimPart(name, int(_number(nbytes, int, _PART_BYTES)), dtype or "uint8"))
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


def _parse_block_format(text: str) -> str:
    if text not in (TOKEN_OUTER, TOKEN_INNER):
        raise ValueError(f"take {TOKEN_OUTER} or {TOKEN_INNER}")
    return text


def _parse_switch(text: str) -> bool:
    if text not in ("on", "off"):
        raise ValueError("take on or off")
    return text == "on"


def _parse_adapters(text: str) -> tuple[Adapter, ...]:
    found: list[Adapter] = []
    for item in text.split("/"):
        name, _, digest = item.partition(":")
        found.append(Adapter(name, digest or hashlib.sha256(name.encode()).hexdigest()[:16]))
    violations = announced_violations([adapter_to_proto(one) for one in found], "adapters")
    if violations:
        named = "; ".join(f"{path}: {remedy}" for path, remedy in violations.items())
        raise ValueError(f'write "NAME" or "NAME:DIGEST", with "/" between: {named}')
    return tuple(found)


def plan_shape(config: EngineConfig) -> SimShape:
    """The engine that `config` describes. Raises ConfigError naming every wrong field."""
    settings = parse_settings(config.model)
    faults: list[_Fault] = [
        (field, getattr(config, field), f"take {least} or more")
        for field, least in (
            ("tensor_parallel_size", 1),
            ("block_size", 0),
            ("max_num_seqs", 1),
            ("max_num_batched_tokens", 1),
            ("max_model_len", 0),
            ("num_gpu_blocks_override", 0),
        )
        if getattr(config, field) < least
    ]
    if config.pipeline_parallel_size != 1:
        remedy = (
            f'the sim engine takes it in model, as in "sim:stages={config.pipeline_parallel_size}"'
        )
        faults.append(("pipeline_parallel_size", config.pipeline_parallel_size, remedy))
    if faults:
        raise _config_error(faults)
    config = replace(config, block_size=config.block_size or BLOCK_TOKENS)
    context = config.max_model_len or settings.context
    block_count = _block_count(config, settings, context)
    capacity = block_count * config.block_size
    shape = SimShape(
        settings=settings,
        tensor_parallel_size=config.tensor_parallel_size,
        block_tokens=config.block_size,
        block_count=block_count,
        max_model_len=min(context, capacity),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
    )
    if config.max_num_batched_tokens < shape.span_tokens:
        remedy = f"take {shape.span_tokens}, which fill whole blocks, or more"
        faults.append(("max_num_batched_tokens", config.max_num_batched_tokens, remedy))
    if config.max_model_len > capacity:
        remedy = f"{block_count} blocks hold {capacity} tokens: take more blocks or less context"
        faults.append(("max_model_len", context, remedy))
    if faults:
        raise _config_error(faults)
    return shape


def _block_count(config: EngineConfig, settings: SimSettings, context: int) -> int:
    """The configured number of blocks, else as many as fit into memory and requests can use."""
    if config.num_gpu_blocks_override:
        return config.num_gpu_blocks_override
    ranks = config.tensor_parallel_size
    token_bytes = page_bytes = 0
    for cache in settings.caches:
        heads = sum(len(heads_held(rank, ranks, cache.heads)) for rank in range(ranks))
        nbytes = len(cache.layers) * heads * cache.head_bytes
        if cache.kind == STATE:
            page_bytes += nbytes
        else:
            token_bytes += nbytes
    budget = (
        int((config.kv_cache_gib or DEFAULT_KV_CACHE_GIB) * _GIB) - config.max_num_seqs * page_bytes
    )
    affordable = budget // (token_bytes * config.block_size)
    if affordable < 1:
        remedy = "it does not hold one block: take more"
        raise _config_error([("kv_cache_gib", config.kv_cache_gib, remedy)])
    useful = config.max_num_seqs * -(-context // config.block_size)
    return min(affordable, useful)


def _config_error(faults: list[_Fault]) -> ConfigError:
    return ConfigError(
        "; ".join(f"{field} is {value!r}: {remedy}" for field, value, remedy in faults),
        metadata={
            "field": ", ".join(field for field, _, _ in faults),
            "value": ", ".join(str(value) for _, value, _ in faults),
        },
    )
