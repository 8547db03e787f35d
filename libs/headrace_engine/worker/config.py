"""Settings that prefill and decode workers share, and the values derived from them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from dataclasses import fields
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar

from pydantic import BeforeValidator, Field, model_validator

from headrace.registry.v1 import registry_pb2
from headrace_common.access.credentials import Credentials
from headrace_common.config import (
    NonNegativeCount,
    PositiveCount,
    PositiveSeconds,
    ServiceConfig,
    TextList,
    WorkerId,
    checked,
    checked_by,
)
from headrace_common.identity import is_worker_id
from headrace_common.limits import (
    DEFAULT_KV_CACHE_GIB,
    LEASE_TTL_MAX_S,
    WRITE_LEASE_S,
    WRITE_QUARANTINE_S,
    write_quiet_s,
)
from headrace_common.ports import split_host_port
from headrace_common.registry.adapters import Adapter, adapter_to_proto
from headrace_common.registry.place import place_of
from headrace_common.version import version
from headrace_engine.config import TRANSPORT, EngineConfig, WorkerRole
from headrace_engine.interface import Engine
from headrace_engine.steps import STEP_STALL_S
from headrace_kv.layout import WorkerRef, layout_to_proto
from headrace_kv.tiers.tiers import TierSettings
from headrace_kv.transport.guard import parse_networks
from headrace_text.model_hub import parse_hub_model

_DEVICE = re.compile(r"[A-Za-z0-9_.-]{1,63}")


def _check_devices(names: tuple[str, ...]) -> None:
    wrong = [name for name in names if not _DEVICE.fullmatch(name)]
    if wrong:
        raise ValueError(
            f"{', '.join(wrong)}: name adapters as `ibv_devices` lists them, such as mlx5_0"
        )


def _join_arguments(value: Any) -> Any:
    """Joins a list of arguments. Returns other values unchanged, for pydantic to check."""
    if isinstance(value, list) and all(isinstance(part, str) for part in value):
        return shlex.join(value)
    return value


def _check_folders(folders: tuple[str, ...]) -> None:
    relative = [folder for folder in folders if not folder.startswith("/")]
    if relative:
        raise ValueError(f"{', '.join(relative)}: name folders from the root, such as /adapters")


DeviceList = Annotated[TextList, checked_by(_check_devices)]
EngineArgs = Annotated[str, BeforeValidator(_join_arguments), Field(max_length=16_384)]
FolderList = Annotated[TextList, checked_by(_check_folders)]
ModelName = Annotated[str, checked_by(parse_hub_model)]
NetworkList = Annotated[TextList, checked_by(parse_networks)]
PlaceLabels = Annotated[TextList, checked_by(place_of)]

REGISTRATION_TIMEOUT_S: Final = 30.0
"""Seconds that the registry may take to answer at start."""
_MEMBER_TTL_MIN_S: Final = 3.0
"""Less would remove workers that only wait for a busy processor."""


class WorkerConfig(ServiceConfig):
    """Settings of every worker."""

    dashed_values: ClassVar[frozenset[str]] = frozenset({"engine_args"})

    worker_id: WorkerId = Field(description="Name that stays the same over restarts.")
    workers_per_process: PositiveCount = Field(
        1,
        description="Workers of this process: engine sim may have hundreds, named worker_id-0 and so on, each on a "
        "port of its own.",
    )
    model: ModelName = Field(
        description="Folder of the model in the Hugging Face layout, or hf:OWNER/NAME or hf:OWNER/NAME@REVISION, which "
        "is downloaded from a Hugging Face hub: vLLM computes. Or sim, or sim:NAME=VALUE, for the simulated engine.",
    )
    served_model: str = Field(
        "", description="Name that clients call the model by; empty means the engine's own."
    )
    transfer_peer_networks: NetworkList = Field(
        (),
        description="Networks such as 10.0.0.0/24, separated by commas. Their hosts always reach the ports of KV "
        "transfers. A decode worker also admits the hosts of prefill workers with an open handoff stream, so this is "
        "for address translation between them. 0.0.0.0/0 admits every host.",
    )
    tensor_parallel_size: PositiveCount = Field(
        1, description="Ranks that share the heads of each layer."
    )
    pipeline_parallel_size: PositiveCount = Field(
        1,
        description="Pipeline stages that share the layers; each has tensor_parallel_size ranks.",
    )
    max_model_len: NonNegativeCount = Field(
        0, description="Most tokens of prompt and answer together; 0 means the model's own."
    )
    max_num_seqs: PositiveCount = Field(64, description="Most requests worked on at once.")
    dtype: str = Field(
        "auto", description="Type of weights and KV cache: auto, float32, bfloat16 or float16."
    )
    num_gpu_blocks_override: NonNegativeCount = Field(
        0, description="KV blocks on each rank; 0 means as many as kv_cache_gib holds."
    )
    kv_cache_gib: float = Field(
        0.0,
        ge=0,
        description="Memory for KV blocks on each rank, in GiB; the workers of a process share it. 0 means what "
        "gpu_memory_utilization leaves on a GPU, and 1 elsewhere.",
    )
    gpu_memory_utilization: float = Field(
        0.9,
        gt=0,
        le=1,
        description="Share of a GPU's memory that one rank uses for weights, activations and KV blocks, where "
        "kv_cache_gib is 0. Workers on one GPU need shares that add up to less than 1.",
    )
    max_num_batched_tokens: PositiveCount = Field(
        2048, description="Most tokens of one engine step, which is the size of a prefill chunk."
    )
    block_size: NonNegativeCount = Field(
        0,
        description="Tokens of one KV block, which is also the grain of the prefix cache; 0 means the engine's own: "
        "vllm's for its platform and model (128 on processors, mostly 16 on CUDA), 32 for sim.",
    )
    gpu_direct: bool = Field(
        True,
        description="Whether RDMA adapters may read and write KV on a GPU where they can; otherwise it crosses host "
        "memory. Engine vllm on CUDA.",
    )
    kv_host_gib: float = Field(
        0.0,
        ge=0,
        description="Main memory for KV blocks that may be needed again, in GiB on each rank, beside kv_cache_gib; "
        "the workers of a process share it. 0 keeps none. For models with attention only.",
    )
    kv_disk_gib: float = Field(
        0.0,
        ge=0,
        description="Space on disk for KV blocks that leave this main memory, in GiB on each rank; needs kv_host_gib.",
    )
    kv_disk_folder: str = Field(
        "/var/tmp",
        description="Folder of the file with these blocks, which has no name and ends with the worker, and of the "
        "events of the worker's last 4 alarms.",
    )
    kv_pool_address: str = Field(
        "",
        description="host:port of the master of a Mooncake Store, where all workers of the deployment share KV blocks; "
        "needs kv_host_gib. Prefill workers store their blocks there, and all workers load them. Its ports check no "
        "caller: open them to the hosts of workers only. Empty means no pool.",
    )
    kv_fetch_timeout_s: PositiveSeconds = Field(
        2.0,
        description="Most seconds that a prompt waits for its KV blocks from a pool or from another worker. What has "
        "not come is computed.",
    )
    rdma_devices: DeviceList = Field(
        (),
        description="RDMA adapters that carry KV, such as mlx5_0,mlx5_1; empty means all of this host.",
    )
    engine_args: EngineArgs = Field(
        "",
        description='Further arguments of engine vllm, as on its own command line: "--quantization fp8 '
        '--kv-cache-dtype fp8". In a file also a list. Those that a setting or Headrace owns are refused by name.',
    )
    adapter_folders: FolderList = Field(
        (),
        description="Folders such as /adapters, separated by commas. Operators may load LoRA adapters from them while "
        "the worker runs, and unload adapters. Give all workers of a model the same ones. Empty: none are loaded and "
        "unloaded.",
    )
    place: PlaceLabels = Field(
        (),
        description="Where this worker runs, for the policy's pair_level, such as zone=eu-1a,rack=r7,host=n3. A rack "
        "may be another group of hosts with fast links. Empty: unknown.",
    )
    lease_ttl_s: PositiveSeconds = Field(
        WRITE_LEASE_S,
        description="Seconds that another worker's rank may write into this worker's KV memory without a message from "
        "it. The registry removes this worker when it is silent for twice as long, 3 to 300 s. Raise it in large "
        "deployments, so that the registry has less to renew.",
    )
    quarantine_s: PositiveSeconds = Field(
        WRITE_QUARANTINE_S,
        description="Seconds that blocks of a failed transfer stay unused after the lease; at least 5, longer than the "
        "transport's own timeout. A frozen sender is ended after half of them.",
    )
    step_stall_s: PositiveSeconds = Field(
        STEP_STALL_S,
        description="Seconds that a step of the engine may take before the worker counts as stalled and its requests "
        "continue elsewhere. Longer where recent steps of its size took more than a quarter of this.",
    )

    @property
    def engine(self) -> Literal["vllm", "sim"]:
        """What computes."""
        return "sim" if self.model.partition(":")[0] == "sim" else "vllm"

    @property
    def member_ttl_s(self) -> float:
        """Seconds after which a silent worker is removed from the registry."""
        return min(LEASE_TTL_MAX_S, max(_MEMBER_TTL_MIN_S, 2 * self.lease_ttl_s))

    @property
    def write_quiet_s(self) -> float:
        """How long bytes of a lost sender may still land in this worker's memory."""
        return write_quiet_s(self.lease_ttl_s, self.quarantine_s)

    @model_validator(mode="after")
    def _check_tiers(self) -> WorkerConfig:
        if self.kv_disk_gib and not self.kv_host_gib:
            raise ValueError(
                f"kv_disk_gib is {self.kv_disk_gib:g} without kv_host_gib: blocks reach the disk from main memory, so "
                "set both"
            )
        if self.kv_pool_address:
            try:
                split_host_port(self.kv_pool_address)
            except ValueError as error:
                raise ValueError(f"kv_pool_address: {error}") from None
            if not self.kv_host_gib:
                raise ValueError(
                    "kv_pool_address is set without kv_host_gib: blocks of the pool pass through main memory, so set "
                    "both"
                )
            if self.workers_per_process > 1:
                raise ValueError(
                    f"kv_pool_address is set with {self.workers_per_process} workers in a process: set "
                    "workers_per_process to 1, or leave kv_pool_address empty"
                )
        return self

    @model_validator(mode="after")
    def _check_workers_per_process(self) -> WorkerConfig:
        workers = self.workers_per_process
        if workers == 1:
            return self
        problems = []
        if self.engine != "sim":
            problems.append(
                f"workers_per_process is {workers}: set model to sim, or start {workers} processes"
            )
        for field in (
            *("internal_listen", "internal_advertise", "listen", "advertise"),
            "health_listen",
        ):
            # Prefill workers have no listen.
            address: str = getattr(self, field, "")
            if address and split_host_port(address)[1]:
                problems.append(
                    f"workers_per_process is {workers}: give {field} the port 0, which takes any"
                )
        if not is_worker_id(_worker_id(self, workers - 1)):
            problems.append(f"workers_per_process is {workers}: choose a shorter worker_id")
        return checked(self, problems)


Config = TypeVar("Config", bound=WorkerConfig)


def worker_configs(config: Config) -> tuple[Config, ...]:
    """The settings of each worker of a process, which has `workers_per_process` of them."""
    # The process writes the file when all its workers have registered.
    config = config.model_copy(update={"port_file": ""})
    if config.workers_per_process == 1:
        return (config,)
    shared = {
        "workers_per_process": 1,
        "kv_cache_gib": (config.kv_cache_gib or DEFAULT_KV_CACHE_GIB) / config.workers_per_process,
        "kv_host_gib": config.kv_host_gib / config.workers_per_process,
        "kv_disk_gib": config.kv_disk_gib / config.workers_per_process,
    }
    return tuple(
        config.model_copy(update={**shared, "worker_id": _worker_id(config, number)})
        for number in range(config.workers_per_process)
    )


def _worker_id(config: WorkerConfig, number: int) -> str:
    return f"{config.worker_id}-{number}"


def engine_config(config: WorkerConfig, *, role: WorkerRole, ref: WorkerRef) -> EngineConfig:
    """The engine's part of the worker's settings. Fields of one name in both have one value."""
    host, _ = split_host_port(config.internal_advertise or config.internal_listen)
    same = {one.name for one in fields(EngineConfig)} & type(config).model_fields.keys()
    return EngineConfig(
        **{name: getattr(config, name) for name in same},
        engine=config.engine,
        role=role,
        ref=ref,
        host=host,
        credentials=Credentials.from_config(config),
        # A decode worker adds the hosts of prefill workers when these open handoff streams.
        admitted=parse_networks(config.transfer_peer_networks),
        write_quiet_s=config.write_quiet_s,
        tiers=TierSettings(
            host_gib=config.kv_host_gib,
            disk_gib=config.kv_disk_gib,
            disk_folder=config.kv_disk_folder,
            pool_address=config.kv_pool_address,
            pool_timeout_s=config.kv_fetch_timeout_s,
            publishes=role != "decode",
        ),
    )


def worker_member(
    config: WorkerConfig,
    *,
    role: registry_pb2.Member.Role.ValueType,
    ref: WorkerRef,
    endpoint: str,
    http_endpoint: str,
    engine: Engine,
    adapters: Iterable[Adapter],
    start_unix_ns: int,
) -> registry_pb2.Member:
    """The worker's record in the registry, once its engine has started."""
    layout = engine.descriptor.layout
    return registry_pb2.Member(
        worker_id=ref.worker_id,
        incarnation=ref.incarnation,
        role=role,
        endpoint=endpoint,
        http_endpoint=http_endpoint,
        model=served_model(config, engine),
        max_model_len=engine.max_model_len,
        layout=layout_to_proto(layout),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        start_unix_ns=start_unix_ns,
        transport=TRANSPORT,
        adapters=map(adapter_to_proto, adapters),
        place=place_of(config.place) if config.place else None,
        version=version(),
    )


def served_model(config: WorkerConfig, engine: Engine) -> str:
    """The name that clients use for the model: as configured, else that of the model folder."""
    return served_name(config) or engine.descriptor.layout.model


def served_name(config: WorkerConfig) -> str:
    """The name that clients use for the model. Empty where only the engine has one."""
    if config.served_model:
        return config.served_model
    if config.engine == "sim":
        return "sim"
    hub_model = parse_hub_model(config.model)
    if hub_model is not None:
        return hub_model.repository
    return config.model.rstrip("/").rpartition("/")[2]
