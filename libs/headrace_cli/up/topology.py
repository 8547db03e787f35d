"""The processes that `headrace up` starts, with their flags and variables."""

from __future__ import annotations

import ctypes
import os
import shlex
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from headrace_common import ports
from headrace_common.errors import ConfigError
from headrace_common.ports import free_port
from headrace_text.model_hub import PREFIX, parse_hub_model

SERVICES = ("registry", "router", "prefill", "decode", "worker", "planner")
WORKER_SERVICES = ("prefill", "decode", "worker")
ENGINE_ARGUMENTS = frozenset({"quantization", "enable_lora", "lora_modules", "trust_remote_code"})
"""Flags of vLLM that are no settings of a worker."""
VLLM_FLAGS = ENGINE_ARGUMENTS | {"served_model_name", "dtype", "gpu_memory_utilization"}
"""Flags that the simulated engine does not have."""
SIM = "sim"
VLLM = "vllm"
# Main memory for KV blocks of each rank, where a store needs some and no setting gives it.
POOLED_HOST_GIB = 0.5
# The package headrace_planner has the planner's pure core.
_MODULES = {"planner": "headrace_planner_service"}
_SAMPLER = "OTEL_TRACES_SAMPLER"
# With more sim workers of a role than this, one process holds all of them.
SIM_PROCESSES = 8
HTTP_PORT_OFFSET = ports.ROUTER_HTTP - ports.ROUTER
PORT_MAX = 65535
POOL_GIB_MAX = 1 << 16


@dataclass(frozen=True, slots=True)
class Topology:
    """The options of `headrace up`. `settings` has further flags as (service, field, value)."""

    engine: str = VLLM
    model: str = ""
    served_model_name: str = ""
    """The name that clients use; empty means the model's own."""
    prefill_count: int = 1
    decode_count: int = 1
    worker_count: int = 0
    """Workers of both roles."""
    port: int = ports.ROUTER
    http_port: int = 0
    """Port of the OpenAI HTTP API; 0 means none. `http_port_of` chooses one."""
    status_port: int = 0
    """Port of the status page; 0 means none. `status_port_of` chooses one."""
    store: str = "memory"
    prefill_tensor_parallel: int = 1
    decode_tensor_parallel: int = 1
    cpu_threads: int = 1
    log_level: str = "info"
    settings: tuple[tuple[str, str, str], ...] = field(default=())
    pool_gib: float = 0.0
    """Memory of a store where all workers share KV blocks; 0 means none."""
    planner: bool = False
    """Whether a planner decides on the numbers of workers from then on."""
    devices: tuple[str, ...] = ()
    """GPUs as CUDA_VISIBLE_DEVICES names them, for the ranks of all workers in turn; none leaves the environment."""

    def count_of(self, service: str) -> int:
        """The workers of a service at the start."""
        counts = (self.prefill_count, self.decode_count, self.worker_count)
        return dict(zip(WORKER_SERVICES, counts, strict=True))[service]

    def ranks_of(self, service: str) -> int:
        """The ranks of a worker of a service, each of which needs a device. Raises ConfigError."""
        prefill, other = self.prefill_tensor_parallel, self.decode_tensor_parallel
        given = {setting: value for target, setting, value in self.settings if target == service}
        default = prefill if service == "prefill" else other
        try:
            ranks = int(given.get("tensor_parallel_size", default))
            return ranks * int(given.get("pipeline_parallel_size", 1))
        except ValueError as error:
            raise ConfigError(f"--set {service}: the number of ranks is wrong: {error}") from error

    @property
    def http_listen(self) -> str:
        """host:port of the OpenAI HTTP API. Empty: no HTTP."""
        default = f"127.0.0.1:{self.http_port}" if self.http_port else ""
        return self.router_settings.get("http_listen", default)

    @property
    def status_listen(self) -> str:
        """host:port of the status page. Empty: none."""
        default = f"127.0.0.1:{self.status_port}" if self.status_port else ""
        return self.router_settings.get("status_listen", default)

    @property
    def router_settings(self) -> dict[str, str]:
        """The further settings of the router."""
        return {name: value for service, name, value in self.settings if service == "router"}

    @property
    def model_name(self) -> str:
        """The name that clients use."""
        if self.engine == SIM:
            return SIM
        if self.served_model_name:
            return self.served_model_name
        hub_model = parse_hub_model(self.model)
        return Path(self.model).resolve().name if hub_model is None else hub_model.repository


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """How to start one process. Once it serves, `port_file` has a line with the addresses of each worker.

    `keeps_log`: whether the log of an earlier process is continued. `worker_count`: workers that the process has.
    """

    name: str
    service: str
    arguments: tuple[str, ...]
    port_file: Path
    log_file: Path
    environment: Mapping[str, str]
    keeps_log: bool = False
    worker_count: int = 1


def check_topology(topology: Topology) -> None:
    """Raises ConfigError, naming the remedy, for a topology that cannot run."""
    if topology.engine not in (SIM, VLLM):
        raise ConfigError(f"engine {topology.engine!r} is unknown: choose vllm or sim")
    if topology.engine == VLLM and not topology.model:
        raise ConfigError(
            "no model: give --model FOLDER or --model hf:OWNER/NAME, run `make model` for the small one, "
            "or try --engine sim"
        )
    if topology.engine == VLLM and _is_no_folder(topology.model):
        raise ConfigError(
            f"{topology.model} is not a model folder: it has no config.json; give another --model, "
            "--model hf:OWNER/NAME to download one, or run `make model` for the small one"
        )
    if not 0 <= topology.pool_gib < POOL_GIB_MAX:
        raise ConfigError(f"--store-pool {topology.pool_gib:g} is no size: give GiB, such as 4")
    for option, given in (("--store-pool", topology.pool_gib), ("--planner", topology.planner)):
        if given and any(topology.count_of(one) > SIM_PROCESSES for one in WORKER_SERVICES):
            raise ConfigError(
                f"{option} needs a process for each worker: give at most {SIM_PROCESSES} of each role, or leave it out"
            )
    if topology.devices:
        _check_devices(topology)
    if topology.decode_count + topology.worker_count < 1 or topology.prefill_count < 0:
        raise ConfigError(
            "at least one worker that generates is needed: give --decode 1 or more, or --workers 1 or more"
        )
    if topology.engine == SIM and topology.model.partition(":")[0] not in ("", SIM):
        raise ConfigError(
            f"--engine sim has no model {topology.model}: leave --model out, or give sim:layers=4"
        )


def _check_devices(topology: Topology) -> None:
    named = ",".join(topology.devices)
    if topology.engine != VLLM:
        raise ConfigError(f"--devices {named} is for --engine vllm: leave it out")
    if topology.planner:
        raise ConfigError(
            f"--devices {named} gives devices to the workers of the start: leave --planner out"
        )
    if len(set(topology.devices)) < len(topology.devices):
        raise ConfigError(f"--devices {named} names a device twice: name each once")
    ranks = {one: topology.ranks_of(one) for one in WORKER_SERVICES if topology.count_of(one)}
    needed = sum(topology.count_of(one) * count for one, count in ranks.items())
    if needed != len(topology.devices):
        raise ConfigError(
            f"--devices {named} names {len(topology.devices)} devices, and the ranks of all workers need {needed}: "
            "name one for each rank"
        )
    if not _has_cuda():
        raise ConfigError(
            f"--devices {named}: this machine has no usable CUDA driver (libcuda.so.1), so workers run on its "
            "processors: leave --devices out"
        )


def _has_cuda() -> bool:
    """Whether the CUDA driver is here and finds a device."""
    try:
        status: int = ctypes.CDLL("libcuda.so.1").cuInit(0)
    except OSError:
        return False
    return status == 0


def _devices_of(topology: Topology, name: str) -> str:
    """CUDA_VISIBLE_DEVICES of a worker of the start: as many devices as it has ranks."""
    first = 0
    for service in WORKER_SERVICES:
        for number in range(topology.count_of(service)):
            ranks = topology.ranks_of(service)
            if name == f"{service}-{number}":
                return ",".join(topology.devices[first : first + ranks])
            first += ranks
    raise ConfigError(f"--devices names none for {name}")


def parse_devices(text: str) -> tuple[str, ...]:
    """Reads "0,1". Raises ConfigError."""
    devices = tuple(part.strip() for part in text.split(","))
    if not all(devices):
        raise ConfigError(
            f"--devices {text!r} is wrong: write the numbers or UUIDs of GPUs, such as 0,1"
        )
    return devices


def _is_no_folder(model: str) -> bool:
    try:
        return parse_hub_model(model) is None and not (Path(model) / "config.json").is_file()
    except ValueError as error:
        raise ConfigError(f"--model: {error}") from error


def named_model(model: str) -> str:
    """As `model`, with "hf:" before OWNER/NAME, unless that is a folder."""
    is_path = model.startswith(("/", "./", "../", "~", PREFIX)) or Path(model).exists()
    return f"{PREFIX}{model}" if model.count("/") == 1 and not is_path else model


def http_port_of(port: int, given: int | None) -> int:
    """The port of the OpenAI HTTP API: `given`, or else 6 above the router's. Any free one where that is 0."""
    default = port + HTTP_PORT_OFFSET if port else 0
    return (default if given is None else given) or free_port()


def status_port_of(port: int) -> int:
    """The port of the status page: 7 above the router's, or any where another process uses that."""
    chosen = port + ports.ROUTER_STATUS - ports.ROUTER
    return chosen if port and not _use_error(chosen) else free_port()


def check_ports(topology: Topology) -> None:
    """Raises ConfigError, which names the option, for a port that another process uses."""
    for option, port in (("--port", topology.port), ("--http-port", topology.http_port)):
        if port > PORT_MAX:
            raise ConfigError(f"no port is {port}: give a lower {option}")
        if error := _use_error(port):
            raise ConfigError(
                f"cannot listen on 127.0.0.1:{port}: {error}; stop what uses the port, or give another {option}"
            )


def _use_error(port: int) -> str:
    """Why no process can listen on a port of loopback. Empty: one can."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError) as error:
            return str(getattr(error, "strerror", error))
    return ""


def parse_setting(text: str) -> tuple[str, str, str]:
    """Reads "decode.max_num_seqs=4". Raises ConfigError."""
    name, equals, value = text.partition("=")
    service, dot, setting = name.partition(".")
    if not equals or not dot or service not in SERVICES or not setting:
        raise ConfigError(
            f"--set {text!r} is wrong: write SERVICE.FIELD=VALUE, such as decode.max_num_seqs=4; "
            f"services are {', '.join(SERVICES)}"
        )
    return service, setting, value


def engine_settings(
    settings: Iterable[tuple[str, str, str]], flags: Mapping[str, str | int | float | list[str]]
) -> Iterator[tuple[str, str, str]]:
    """`settings`, after the flags of vLLM that were given, as settings of all workers.

    A worker has a setting of the same name for most. The others become part of its `engine_args`.
    """
    own: dict[str, str] = {}
    arguments: list[str] = []
    for name, value in flags.items():
        if value and name in ENGINE_ARGUMENTS:
            values = value if isinstance(value, list) else [str(value)]
            arguments += [f"--{name.replace('_', '-')}", *(values if value is not True else ())]
        elif value:
            own[name] = str(value)
    if arguments:
        own["engine_args"] = shlex.join(arguments)
    for service in WORKER_SERVICES:
        yield from ((service, name, value) for name, value in own.items())
    for service, name, value in settings:
        both = name == "engine_args" and name in own
        yield service, name, f"{own[name]} {value}" if both else value


def parse_ranks(text: str) -> tuple[int, int]:
    """Reads "2" or "2:1" as ranks of prefill and decode. Raises ConfigError."""
    first, colon, second = text.partition(":")
    sides = (first, second if colon else first)
    if not all(side.isdecimal() and int(side) > 0 for side in sides):
        raise ConfigError(
            f"--tensor-parallel-size {text!r} is wrong: write N, or N:M for prefill and decode"
        )
    return int(sides[0]), int(sides[1])


def registry_spec(topology: Topology, folder: Path) -> ProcessSpec:
    """The registry, on any free port."""
    return _spec(
        topology,
        folder,
        "registry",
        "registry",
        ["--internal-listen=127.0.0.1:0", f"--store={topology.store}"],
    )


def router_spec(topology: Topology, folder: Path, registry: str) -> ProcessSpec:
    """The router, on the port that clients use."""
    model = SIM if topology.engine == SIM else f"{topology.model_name}={topology.model}"
    return _spec(
        topology,
        folder,
        "router",
        "router",
        [
            f"--listen=127.0.0.1:{topology.port}",
            "--internal-listen=127.0.0.1:0",
            f"--http-listen={topology.http_listen}",
            f"--status-listen={topology.status_listen}",
            f"--registry={registry}",
            f"--model={model}",
            "--router-id=router-0",
        ],
    )


def pool_spec(topology: Topology, folder: Path, address: str) -> ProcessSpec:
    """The store of all workers' KV blocks, at a loopback address that stays the same over its restarts."""
    port_file = folder / "pool.port"
    flags = [
        f"--listen={address}",
        f"--memory-gib={topology.pool_gib:g}",
        f"--port-file={port_file}",
    ]
    return ProcessSpec(
        name="pool",
        service="pool",
        arguments=(sys.executable, "-m", "headrace_kv.tiers.pool_server", *flags),
        port_file=port_file,
        log_file=folder / "pool.log",
        environment={"PYTHONUNBUFFERED": "1"},
    )


def worker_specs(
    topology: Topology, folder: Path, registry: str, pool: str = ""
) -> list[ProcessSpec]:
    """The processes of all workers, on any free ports. `pool`: the address of their store."""
    return [
        worker_spec(topology, folder, (registry, pool), service, name, worker_count)
        for service in WORKER_SERVICES
        for name, worker_count in _processes(topology, service)
    ]


def worker_spec(
    topology: Topology,
    folder: Path,
    addresses: tuple[str, str],
    service: str,
    name: str,
    worker_count: int = 1,
) -> ProcessSpec:
    """One process of workers, on any free ports. `addresses`: of the registry, and of the store of KV blocks."""
    registry, pool = addresses
    ranks = {
        "prefill": topology.prefill_tensor_parallel,
        "decode": topology.decode_tensor_parallel,
        "worker": topology.decode_tensor_parallel,
    }
    flags = [
        "--internal-listen=127.0.0.1:0",
        f"--registry={registry}",
        f"--worker-id={name}",
        f"--model={topology.model or SIM}",
        f"--served-model={topology.model_name}",
        f"--tensor-parallel-size={ranks[service]}",
    ]
    if pool:
        flags += [f"--kv-pool-address={pool}", f"--kv-host-gib={POOLED_HOST_GIB}"]
    if worker_count > 1:
        flags.append(f"--workers-per-process={worker_count}")
    spec = replace(_spec(topology, folder, name, service, flags), worker_count=worker_count)
    if not topology.devices:
        return spec
    visible = {"CUDA_VISIBLE_DEVICES": _devices_of(topology, name)}
    return replace(spec, environment={**spec.environment, **visible})


def planner_spec(topology: Topology, folder: Path, registry: str, address: str) -> ProcessSpec:
    """The planner, at a loopback address that stays the same over its restarts."""
    flags = [
        f"--internal-listen={address}",
        f"--registry={registry}",
        f"--model={topology.model_name}",
        "--mode=publish",
    ]
    return _spec(topology, folder, "planner", "planner", flags)


def shares_processes(topology: Topology, service: str) -> bool:
    """Whether the workers of a service share processes."""
    return topology.engine == SIM and topology.count_of(service) > SIM_PROCESSES


def _processes(topology: Topology, service: str) -> list[tuple[str, int]]:
    """Name and number of workers of each process of a service."""
    count = topology.count_of(service)
    if shares_processes(topology, service):
        return [(service, count)]
    return [(f"{service}-{index}", 1) for index in range(count)]


def _spec(
    topology: Topology, folder: Path, name: str, service: str, flags: list[str]
) -> ProcessSpec:
    port_file = folder / f"{name}.port"
    chosen = {flag.partition("=")[0]: flag for flag in flags}
    chosen["--port-file"] = f"--port-file={port_file}"
    chosen["--log-level"] = f"--log-level={topology.log_level}"
    for target, setting, value in topology.settings:
        if target == service:
            flag = "--" + setting.replace("_", "-")
            chosen[flag] = f"{flag}={value}"
    return ProcessSpec(
        name=name,
        service=service,
        arguments=(
            sys.executable,
            "-m",
            _MODULES.get(service, f"headrace_{service}"),
            *chosen.values(),
        ),
        port_file=port_file,
        log_file=folder / f"{name}.log",
        environment={
            "OMP_NUM_THREADS": str(topology.cpu_threads),
            "PYTHONUNBUFFERED": "1",
            _SAMPLER: os.environ.get(_SAMPLER, "parentbased_always_on"),
        },
    )
