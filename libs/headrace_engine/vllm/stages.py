"""Pipeline stages of a vLLM engine. Depends on vLLM's internals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sequence import IntermediateTensors
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

T = TypeVar("T")


def stage_count(vllm_config: VllmConfig) -> int:
    """Pipeline stages of the engine."""
    found: int = vllm_config.parallel_config.pipeline_parallel_size
    return found


def rank_count(vllm_config: VllmConfig) -> int:
    """Ranks of all stages."""
    found: int = vllm_config.parallel_config.tensor_parallel_size
    return found * stage_count(vllm_config)


def stage_of_this_rank() -> int:
    """The pipeline stage of this process."""
    from vllm.distributed.parallel_state import get_pp_group

    found: int = get_pp_group().rank_in_group
    return found


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
    found: int = max(end - start for start, end in spans)
    return found
