"""Pipeline stages, hosts and data-parallel ranks of a vLLM engine. Depends on vLLM's internals.

Only models with experts have data-parallel ranks: all compute the experts together.
"""

from __future__ import annotations

from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from headrace_common.errors import ConfigError
from headrace_engine.vllm.compat import replica_count, runs_on_cpu

if TYPE_CHECKING:
    from torch import Tensor
    from vllm.config import VllmConfig
    from vllm.sequence import IntermediateTensors
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

T = TypeVar("T")


def stage_count(vllm_config: VllmConfig) -> int:
    """Pipeline stages of the engine."""
    return int(vllm_config.parallel_config.pipeline_parallel_size)


def rank_count(vllm_config: VllmConfig) -> int:
    """Ranks of all stages."""
    found: int = vllm_config.parallel_config.tensor_parallel_size
    return found * stage_count(vllm_config)


def stage_of_this_rank() -> int:
    """The pipeline stage of this process."""
    from vllm.distributed.parallel_state import get_pp_group

    return int(get_pp_group().rank_in_group)


def install(vllm_config: VllmConfig) -> None:
    """On a rank, before its first step. Makes a later stage allocate the buffer for the results of the stage before it.

    vLLM allocates it in a warm-up, which it leaves out on processors that compile nothing. The first step then fails.
    """
    if stage_count(vllm_config) == 1:
        return
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    found = GPUModelRunner.sync_and_gather_intermediate_tensors
    plain = getattr(found, "__wrapped__", found)

    def synchronize(runner: GPUModelRunner, *arguments: Any) -> IntermediateTensors:
        if runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens,
                dtype=runner.model_config.dtype,
                device=runner.device,
            )
        return plain(runner, *arguments)

    synchronize.__wrapped__ = plain  # type: ignore[attr-defined]
    GPUModelRunner.sync_and_gather_intermediate_tensors = synchronize


def gather_from_stages(own: T) -> list[T]:
    """One value from each stage, by stage. All ranks must call it at the same point."""
    import torch.distributed
    from vllm.distributed.parallel_state import get_pp_group

    group = get_pp_group()
    if group.world_size == 1:
        return [own]
    found: list[T] = [own] * group.world_size
    torch.distributed.all_gather_object(found, own, group=group.cpu_group)
    return found


def stage_layers_max(vllm_config: VllmConfig) -> int:
    """The most layers of a stage, 0 without stages. Every process gets the same, from its own caches it could not."""
    from vllm.distributed.utils import get_pp_indices

    stages = stage_count(vllm_config)
    if stages == 1:
        return 0
    layers = vllm_config.model_config.get_total_num_hidden_layers()
    spans = (get_pp_indices(layers, stage, stages) for stage in range(stages))
    return int(max(end - start for start, end in spans))


def node_rank(vllm_config: VllmConfig) -> int:
    """This host's number among those of the engine. The scheduler and the first ranks are on number 0."""
    return int(vllm_config.parallel_config.node_rank)


def value_of_first_rank(vllm_config: VllmConfig, own: T) -> T:
    """Rank 0's value where the engine has several hosts, else this rank's. All ranks must call it at the same point."""
    if vllm_config.parallel_config.nnodes == 1:
        return own
    import torch.distributed
    from vllm.distributed.parallel_state import get_world_group

    found = [own]
    torch.distributed.broadcast_object_list(found, src=0, group=get_world_group().cpu_group)
    return found[0]


def wait_for_end(executor: MultiprocExecutor) -> None:
    """Blocks until one of the ranks that `start_ranks` has started ends."""
    wait([rank.proc.sentinel for rank in executor.workers])


class GroupPlace(NamedTuple):
    """A rank's place in its group. RankGroup connects to `port` of rank 0's `address`."""

    rank: int
    size: int
    address: str
    port: int


def group_place(vllm_config: VllmConfig) -> GroupPlace | None:
    """None without data-parallel ranks. Prepares vLLM for them otherwise. Raises ConfigError."""
    if replica_count(vllm_config) == 1:
        return None
    if not vllm_config.model_config.is_moe:
        raise ConfigError(
            "engine_args: the model has no experts, so data-parallel ranks would share nothing: leave out "
            "data_parallel_size, and start more workers",
            metadata={"field": "engine_args"},
        )
    if runs_on_cpu():
        supply_collectives()
    ranks = vllm_config.parallel_config
    return GroupPlace(
        ranks.data_parallel_rank,
        ranks.data_parallel_size,
        ranks.data_parallel_master_ip,
        # The engine's process inherits vLLM's socket, so that the port itself stays in use.
        ranks.data_parallel_rpc_port + 1,
    )


def kill_engine(llm: AsyncLLM) -> None:
    """Kills the engine's process, which may wait for another rank. The processes that it has started end with it."""
    for process in llm.engine_core.resources.engine_manager.processes:
        process.kill()


def coordinator_sentinel(llm: AsyncLLM) -> int | None:
    """Readable once vLLM's coordinator has ended, which wakes idle ranks. None elsewhere than on rank 0."""
    coordinator = llm.engine_core.resources.coordinator
    if coordinator is None:
        return None
    return int(coordinator.proc.sentinel)


def supply_collectives() -> None:
    """Adds what vLLM's communicator for processors lacks. Processes that are forked afterwards have it too."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    CpuCommunicator.all_gatherv = all_gatherv
    CpuCommunicator.reduce_scatterv = reduce_scatterv


def all_gatherv(
    communicator: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None
) -> Any:
    """The rows of all ranks in their order, also of each tensor of a list. `sizes`: rows of each rank, None where
    all have as many. vLLM's `dim` is always 0.
    """
    import torch

    if isinstance(input_, list | tuple):
        return [all_gatherv(communicator, one, dim, sizes) for one in input_]
    counts = sizes or [len(input_)] * communicator.world_size
    padded = input_.new_zeros((max(counts), *input_.shape[1:]))
    padded[: len(input_)] = input_
    parts = [torch.empty_like(padded) for _ in counts]
    torch.distributed.all_gather(parts, padded, group=communicator.cpu_group)
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


def reduce_scatterv(
    communicator: Any, input_: Tensor, dim: int = -1, sizes: list[int] | None = None
) -> Tensor:
    """This rank's rows of the sum of all ranks' tensors. `sizes` and `dim`: as of all_gatherv."""
    import torch

    total = input_.clone(memory_format=torch.contiguous_format)
    torch.distributed.all_reduce(total, group=communicator.cpu_group)
    counts = sizes or [len(total) // communicator.world_size] * communicator.world_size
    start = sum(counts[: communicator.rank_in_group])
    return total[start : start + counts[communicator.rank_in_group]].clone()
