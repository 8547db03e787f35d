"""Starts and ends vLLM in processes of its own, with settings made from an EngineConfig."""

from __future__ import annotations

import ctypes
import logging
import os
import secrets
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from headrace_common.errors import ConfigError
from headrace_common.limits import DEFAULT_KV_CACHE_GIB
from headrace_engine.config import EngineConfig
from headrace_engine.vllm.compat import (
    import_vllm,
    require_vllm,
    runs_on_cpu,
    schedules_ahead,
    set_vllm_environment,
    start_llm,
    start_ranks,
)
from headrace_engine.vllm.drafts import find_draft
from headrace_engine.vllm.link.messages import read_startup_error
from headrace_engine.vllm.model_folder import ModelFolder, read_model_folder
from headrace_engine.vllm.parallel import GroupPlace, group_place
from headrace_engine.vllm.service.adapters import (
    LORA_MODULES,
    EngineAdapters,
    lora_arguments,
    read_adapters,
)
from headrace_engine.vllm.service.engine_args import (
    OFFLOADING,
    SPECULATION,
    check_combinations,
    fingerprint_with,
    link_address,
    parse_engine_args,
    split_engine_args,
    take_kv_events,
    take_offloading,
)
from headrace_engine.vllm.settings import ConnectorSettings

if TYPE_CHECKING:
    from vllm.config import KVEventsConfig, ModelConfig, VllmConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

T = TypeVar("T")

PR_SET_PDEATHSIG = 1
# A thread requests Python's global lock after this time. Forward pass, sender and streams alternate several times in
# a layer, and a layer may take less than the default of 5 ms.
SWITCH_S = 0.0005
# Parameters of glibc's mallopt. The values disable trimming and separately mapped allocations.
M_TRIM_THRESHOLD, NEVER = -1, -1
M_MMAP_MAX, NONE = -4, 0


class _ForkHook:
    """Sets up each process that is forked while it is enabled."""

    def __init__(self) -> None:
        self._registered = False
        self._parent_pid = 0
        self._keeps_memory = False

    def enable(self, keeps_memory: bool) -> None:
        if not self._registered:
            os.register_at_fork(after_in_child=self._set_up_child)
            self._registered = True
        self._parent_pid, self._keeps_memory = os.getpid(), keeps_memory

    def disable(self) -> None:
        self._parent_pid = 0

    def _set_up_child(self) -> None:
        parent_pid = self._parent_pid
        if not parent_pid:
            return
        # The engine forks its ranks itself, and they end with the engine.
        self._parent_pid = os.getpid()
        os.setsid()
        sys.setswitchinterval(SWITCH_S)
        # The child's signals must not wake the parent's event loop.
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        libc = ctypes.CDLL(None, use_errno=True)
        if self._keeps_memory:
            # Every layer of a forward pass allocates and frees tens of megabytes. Pages that were returned to the
            # system would be zeroed again.
            libc.mallopt(M_TRIM_THRESHOLD, NEVER)
            libc.mallopt(M_MMAP_MAX, NONE)
        if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0 or os.getppid() != parent_pid:
            os._exit(1)


_fork_hook = _ForkHook()


@contextmanager
def engine_children(*, keeps_memory: bool) -> Iterator[None]:
    """Processes forked inside end with this one, and get no signals of its terminal.

    With `keeps_memory`, they reuse freed memory instead of returning it to the system.
    """
    _fork_hook.enable(keeps_memory)
    try:
        yield
    finally:
        _fork_hook.disable()


log = logging.getLogger(__name__)

_LEAST_FREE_SHARE = 0.02
DTYPES = ("auto", "float32", "bfloat16", "float16")
FIT_TO_MEMORY = -1
_SCHEDULERS = "headrace_engine.vllm.scheduler.budget_scheduler"
BUDGET_SCHEDULER = f"{_SCHEDULERS}.BudgetScheduler"
BUDGET_ASYNC_SCHEDULER = f"{_SCHEDULERS}.BudgetAsyncScheduler"
WORKER_EXTENSION = "headrace_engine.vllm.rank.hidden_states.HiddenStates"
MAMBA2_MODEL_TYPES = frozenset({"falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h", "zamba2"})


def check_config(config: EngineConfig) -> ModelFolder:
    """Checks the settings before anything is loaded. Raises ConfigError."""
    require_vllm()
    if config.dtype not in DTYPES:
        raise _wrong("dtype", f"dtype is {config.dtype!r}: choose one of {', '.join(DTYPES)}")
    if config.max_num_batched_tokens < config.max_num_seqs:
        raise _wrong(
            "max_num_batched_tokens",
            f"max_num_batched_tokens is {config.max_num_batched_tokens}, fewer than max_num_seqs "
            f"({config.max_num_seqs}): raise it, or lower max_num_seqs",
        )
    _require_room(config)
    split_engine_args(config.engine_args)
    return read_model_folder(config.model, config.max_model_len)


def _wrong(field: str, detail: str) -> ConfigError:
    return ConfigError(detail, metadata={"field": field})


def _require_room(config: EngineConfig) -> None:
    name = "num_gpu_blocks_override"
    if config.num_gpu_blocks_override == 1:
        raise _wrong(name, f"1 block holds no tokens, because vLLM reserves it: raise {name}")
    # Where vLLM chooses the block size while it loads, it checks by itself whether the blocks are enough.
    held = (config.num_gpu_blocks_override - 1) * config.block_size
    if config.num_gpu_blocks_override and config.block_size and config.max_model_len > held:
        raise _wrong(
            name,
            f"{config.num_gpu_blocks_override} blocks of {config.block_size} tokens hold {held} tokens: "
            f"raise {name}, or lower max_model_len",
        )


@dataclass(frozen=True, slots=True)
class Launched:
    """A running engine, the adapters that it is to load, and its place among data-parallel ranks."""

    llm: AsyncLLM
    adapters: EngineAdapters
    place: GroupPlace | None
    settings: ConnectorSettings
    kv_events: KVEventsConfig | None
    """Where others read vLLM's KV events."""


def launch(config: EngineConfig, folder: ModelFolder, link_path: Path) -> Launched:
    """Loads the model in processes of its own. Blocks until they can serve. Must run on the main thread.

    Raises ConfigError when vLLM rejects the model or the settings.
    """
    return _with_vllm(config, folder, link_path, _start_engine)


def launch_ranks(config: EngineConfig, folder: ModelFolder, link_path: Path) -> MultiprocExecutor:
    """As `launch`, for the ranks of this host where the engine is on another one. All must load before any serves."""

    def start(args: AsyncEngineArgs, *_: object) -> MultiprocExecutor:
        vllm_config = _vllm_config(args)
        with engine_children(keeps_memory=runs_on_cpu()):
            return start_ranks(vllm_config)

    return _with_vllm(config, folder, link_path, start)


def _with_vllm(
    config: EngineConfig, folder: ModelFolder, link_path: Path, start: Callable[..., T]
) -> T:
    set_vllm_environment(
        host=config.host,
        kv_cache_gib=config.kv_cache_gib or DEFAULT_KV_CACHE_GIB,
        rank_count=config.rank_count,
        socket_folder=link_path.parent,
    )
    start_s = time.monotonic()
    log.info("loading vLLM")
    with warnings.catch_warnings():
        # vLLM and torch warn of deprecated names, here and in the forked processes.
        warnings.simplefilter("ignore")
        import_vllm()
        vllm_s = time.monotonic() - start_s
        log.info("loading model %s (vLLM took %.1f s)", folder.path.name, vllm_s)
        try:
            return start(*_engine_args(config, folder, link_path))
        except (RuntimeError, ValueError) as exc:
            startup_error = read_startup_error(link_path)
            if startup_error is not None:
                raise startup_error from exc
            message = " ".join(str(exc).split())[:300]
            raise ConfigError(
                f"vLLM cannot serve {folder.path}: {message}; its log above has the cause",
                metadata={"field": "model", "model": config.model},
            ) from exc


def _start_engine(
    args: AsyncEngineArgs,
    adapters: EngineAdapters,
    settings: ConnectorSettings,
    kv_events: KVEventsConfig | None,
) -> Launched:
    vllm_config = _vllm_config(args)
    place = group_place(vllm_config)
    if place is not None:
        log.info("waiting for the data-parallel ranks; this is %d of %d", place.rank, place.size)
    with engine_children(keeps_memory=runs_on_cpu()):
        return Launched(start_llm(vllm_config), adapters, place, settings, kv_events)


def _vllm_config(args: AsyncEngineArgs) -> VllmConfig:
    vllm_config = args.create_engine_config()
    require_dtype(vllm_config.model_config, on_cpu=runs_on_cpu())
    _choose_scheduler(vllm_config, args.async_scheduling)
    return vllm_config


def require_dtype(model: ModelConfig, *, on_cpu: bool) -> None:
    """Raises ConfigError when vLLM would start the engine, and end it with the first prompt."""
    layers = getattr(model.hf_text_config, "layer_types", None) or ()
    if on_cpu and "linear_attention" in layers and str(model.dtype) != "torch.bfloat16":
        raise _wrong("dtype", "on processors, gated delta nets need dtype bfloat16: set it")


def _choose_scheduler(vllm_config: VllmConfig, async_scheduling: bool | None) -> None:
    """Unless the user has chosen, vLLM decides by the platform whether steps are planned ahead."""
    scheduler = vllm_config.scheduler_config
    if async_scheduling:
        # For CPUs, vLLM turns it off whatever the user has chosen, although it works there.
        scheduler.async_scheduling = True
    ahead = schedules_ahead(vllm_config)
    scheduler.scheduler_cls = BUDGET_ASYNC_SCHEDULER if ahead else BUDGET_SCHEDULER


def _device_args(config: EngineConfig, folder: ModelFolder, *, on_cpu: bool) -> dict[str, Any]:
    """The settings of vLLM that depend on the device."""
    if on_cpu:
        # Compiling takes minutes on a CPU. The environment has the size of the KV cache.
        if folder.has_latent_attention and config.dtype not in ("auto", "bfloat16"):
            # On a CPU with AMX, vLLM would choose a backend that has bfloat16 only, and fail.
            return {"enforce_eager": True, "attention_backend": "CPU_MLA"}
        return {"enforce_eager": True}
    # Graphs are captured around the layer hooks, see HeadraceConnector.requires_piecewise_for_cudagraph.
    args: dict[str, Any] = {"enforce_eager": config.enforce_eager}
    if not config.kv_cache_gib:
        return {**args, "gpu_memory_utilization": config.gpu_memory_utilization}
    return {
        **args,
        "kv_cache_memory_bytes": int(config.kv_cache_gib * 2**30),
        # The KV cache has a fixed size. vLLM only compares this share with the free memory at the start.
        "gpu_memory_utilization": _LEAST_FREE_SHARE,
    }


def kv_role(config: EngineConfig) -> str:
    """The role that vLLM gets. To vLLM, a prefill worker consumes KV too.

    With several steps under way, one may still write to the blocks of a request that has ended. For consumers, vLLM
    keeps such blocks back (I1), and a prefill worker receives prefixes into free blocks.
    """
    return "kv_both" if config.sends else "kv_consumer"


def _transfer_config(
    config: EngineConfig, settings: ConnectorSettings, offloading: dict[str, Any] | None
) -> dict[str, Any]:
    """vLLM's KVTransferConfig. With `offloading`, vLLM's OffloadingConnector gets it and runs beside ours."""
    ours = {
        "kv_connector": "HeadraceConnector",
        "kv_connector_module_path": "headrace_engine.vllm.connector",
        "kv_role": kv_role(config),
        # When KV does not come, a prompt is computed. A request that generates fails, and the router tries again.
        # An engine for both ends both, and PrefillRequest runs the prompt again.
        "kv_load_failure_policy": "fail" if config.receives else "recompute",
        "kv_connector_extra_config": settings.to_extra_config(),
    }
    if offloading is None:
        return ours
    theirs = {
        "kv_connector": OFFLOADING,
        "kv_role": "kv_both",
        "kv_connector_extra_config": offloading,
    }
    return {
        **ours,
        "kv_connector": "HeadraceOffloadingConnector",
        "kv_connector_module_path": "headrace_engine.vllm.offload_connector",
        "kv_connector_extra_config": {"connectors": [ours, theirs]},
    }


def _engine_args(
    config: EngineConfig, folder: ModelFolder, link_path: Path
) -> tuple[AsyncEngineArgs, EngineAdapters, ConnectorSettings, KVEventsConfig | None]:
    from vllm.config import KVEventsConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    from headrace_engine.vllm.service.kv_events import events_endpoint

    given = parse_engine_args(split_engine_args(config.engine_args), config.role)
    check_combinations(given, config.pipeline_parallel_size)
    kv_events, offloading = take_kv_events(given), take_offloading(given)
    if offloading is not None and config.tiers.names:
        raise _wrong(
            "kv_host_gib",
            "kv_host_gib and vLLM's offloading would keep the same blocks twice: set kv_host_gib to 0, or leave out "
            "kv_offloading_size and kv_transfer_config of engine_args",
        )
    adapters = read_adapters(given.pop(LORA_MODULES, ()), given | {"model": folder.path})
    draft = ""
    if given.get(SPECULATION):
        given[SPECULATION], draft = find_draft(given[SPECULATION])
    settings = ConnectorSettings(
        role=config.role,
        worker_id=config.ref.worker_id,
        incarnation=config.ref.incarnation,
        host=config.host,
        transport=config.transport,
        fingerprint=fingerprint_with(folder.fingerprint, given, draft),
        link_path=str(link_path),
        credentials=config.credentials,
        gpu_direct=config.gpu_direct,
        rdma_devices=config.rdma_devices,
        admitted=None if config.admitted is None else tuple(map(str, config.admitted)),
        link_address=link_address(given),
        link_secret=secrets.token_hex(),
        write_quiet_s=config.write_quiet_s,
        tiers=config.tiers,
    )
    ours: dict[str, Any] = dict(
        model=str(folder.path),
        dtype=config.dtype,
        seed=config.seed,
        max_model_len=config.max_model_len or FIT_TO_MEMORY,
        tensor_parallel_size=config.tensor_parallel_size,
        pipeline_parallel_size=config.pipeline_parallel_size,
        # None: vLLM chooses it for platform and model.
        block_size=config.block_size or None,
        num_gpu_blocks_override=config.num_gpu_blocks_override or None,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        # To keep states from the middle of a prompt, vLLM calls a kernel that its CPU build lacks, and fails.
        enable_prefix_caching=not (runs_on_cpu() and folder.model_type in MAMBA2_MODEL_TYPES),
        kv_events_config=KVEventsConfig(
            enable_kv_cache_events=True, publisher="zmq", endpoint=events_endpoint(link_path)
        ),
        enable_chunked_prefill=True,
        # Requests have no others. vLLM would reserve memory for the largest ones.
        limit_mm_per_prompt={"video": 0, "audio": 0},
        **_device_args(config, folder, on_cpu=runs_on_cpu()),
        # vLLM needs the tokenizer for structured outputs only.
        skip_tokenizer_init=not folder.has_tokenizer,
        generation_config="vllm",
        # By default, an engine's first request decides. This library bounds the work of a grammar at its start and in
        # each step, and refuses what it cannot enforce.
        structured_outputs_config={"backend": "guidance"},
        disable_log_stats=True,
        use_tqdm_on_load=False,
        worker_extension_cls=WORKER_EXTENSION,
        kv_transfer_config=_transfer_config(config, settings, offloading),
    )
    lora = lora_arguments(adapters, given, on_cpu=runs_on_cpu())
    loaded = EngineAdapters(adapters, given | {"model": folder.path}, on_cpu=runs_on_cpu())
    return AsyncEngineArgs(**{**ours, **lora, **given}), loaded, settings, kv_events
