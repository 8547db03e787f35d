"""The configuration of an engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from headrace_common.rpc.channel import TlsFiles
from headrace_kv.layout.layout import WorkerRef
from headrace_kv.receive.early_start import LateLayers


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
