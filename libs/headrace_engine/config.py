"""The configuration of an engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from headrace_common.access.credentials import Credentials
from headrace_common.limits import write_quiet_s
from headrace_engine.steps import STEP_STALL_S
from headrace_kv.layout import WorkerRef
from headrace_kv.tiers.tiers import TierSettings
from headrace_kv.transport.guard import Networks

TRANSPORT: Final = "mooncake"
"""What moves KV between workers: RDMA where the host has it, else TCP."""


WorkerRole: TypeAlias = Literal["prefill", "decode", "both"]
"""What a worker does: computes prompts for others, or generates, or both with one engine."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The configuration of an engine.

    `engine`: "vllm" or "sim". `model`: a path, or "sim" with settings as in "sim:layers=4,heads=4".
    `host`: the address under which other workers reach this one's memory. `tensor_parallel_size`:
    ranks of a pipeline stage. `pipeline_parallel_size`: stages. `max_model_len`: most tokens of prompt
    and answer together; 0 takes the model's own.
    `max_num_seqs`: requests held at a time. `dtype`: type of the weights, "auto" for the model's
    own. `num_gpu_blocks_override`: KV blocks per rank; 0 takes what `kv_cache_gib` holds. `kv_cache_gib`: memory for KV
    blocks per rank; 0 takes what a GPU's share leaves, and 1 GiB elsewhere. `max_num_batched_tokens`:
    most prompt tokens computed in one step. `block_size`: tokens of one KV block; 0 takes the
    engine's own. `seed`: of requests without one. `local_broadcast`: whether decode ranks of one
    host copy equal KV to each other, where the engine supports it. `credentials`:
    what handoff streams present. `admitted`: networks from which hosts may connect to the KV transport at first; None
    means every host. `write_quiet_s`: how long bytes of a lost sender may still land.
    For GPUs: `gpu_direct` gives RDMA adapters access to their memory, and
    `enforce_eager` disables graphs. `gpu_memory_utilization`: share of a GPU's memory for weights, activations and KV
    blocks, where `kv_cache_gib` is 0. `rdma_devices`: RDMA adapters that carry KV; empty means all. `engine_args`:
    further arguments in the syntax of vLLM's command line. `tiers`: what each rank keeps below KV memory.
    `step_stall_s`: see StepWatch.
    """

    engine: Literal["vllm", "sim"]
    model: str
    role: WorkerRole
    ref: WorkerRef
    host: str = "127.0.0.1"
    transport: str = TRANSPORT
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    max_model_len: int = 0
    max_num_seqs: int = 64
    dtype: str = "auto"
    num_gpu_blocks_override: int = 0
    kv_cache_gib: float = 0.0
    max_num_batched_tokens: int = 2048
    block_size: int = 0
    seed: int = 0
    local_broadcast: bool = True
    credentials: Credentials = field(default_factory=Credentials)
    gpu_direct: bool = True
    enforce_eager: bool = False
    gpu_memory_utilization: float = 0.9
    rdma_devices: tuple[str, ...] = ()
    engine_args: str = ""
    admitted: Networks | None = None
    write_quiet_s: float = write_quiet_s()
    tiers: TierSettings = field(default_factory=TierSettings)
    step_stall_s: float = STEP_STALL_S

    @property
    def sends(self) -> bool:
        """Whether the engine computes prompts for other workers."""
        return self.role != "decode"

    @property
    def receives(self) -> bool:
        """Whether the engine generates, from KV that others send."""
        return self.role != "prefill"

    @property
    def rank_count(self) -> int:
        """Ranks of all stages."""
        return self.tensor_parallel_size * self.pipeline_parallel_size
