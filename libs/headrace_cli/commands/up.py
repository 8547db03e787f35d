"""`headrace up`, `add`, `down` and `demo`: a whole deployment on this machine."""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from headrace_cli.client import open_router, open_router_internally
from headrace_cli.commands.chat import ChatOptions, chat_once, summary
from headrace_cli.commands.trace import show_trace
from headrace_cli.options import (
    DEFAULT_MODEL,
    DEFAULT_ROUTER,
    AddressedCommand,
    CpuThreads,
    DecodeCount,
    Devices,
    Dtype,
    EnableLora,
    Engine,
    GpuMemoryUtilization,
    HttpPort,
    Logs,
    LoraModules,
    MaxModelLen,
    MaxNumBatchedTokens,
    MaxNumSeqs,
    MaxTokens,
    Model,
    Port,
    PrefillCount,
    Quantization,
    Router,
    ServedModelName,
    Settings,
    Store,
    StorePool,
    TensorParallel,
    TrustRemoteCode,
    WorkerCount,
)
from headrace_cli.output import answer_console, command, notice_console, option
from headrace_cli.state import (
    ADD_ANSWER,
    ADD_FAILED,
    ADD_REQUEST,
    default_folder,
    is_locked,
    nothing_serves,
    read_state,
    router_port,
)
from headrace_cli.up.deployment import Deployment, Signals, deployed
from headrace_cli.up.keeping import run_up
from headrace_cli.up.topology import (
    SIM,
    VLLM_FLAGS,
    WORKER_SERVICES,
    Topology,
    engine_settings,
    http_port_of,
    named_model,
    parse_devices,
    parse_ranks,
    parse_setting,
    status_port_of,
)
from headrace_common import ports
from headrace_common.errors import (
    ConfigError,
    DeadlineExceeded,
    HeadraceError,
    WorkerGone,
)

_POLL_S: Final = 0.2


@command(
    "up",
    "headrace up   |   headrace up --engine sim --prefill 2 --decode 2   |   "
    "headrace up --engine sim --planner   |   "
    "headrace up --model ~/models/SmolLM2-135M-Instruct --set decode.kv_cache_gib=2",
)
async def up(  # noqa: PLR0913, PLR0917 - every option is one of the user's
    engine: Engine = "vllm",
    model: Model = "",
    workers: WorkerCount = 0,
    prefill: PrefillCount = None,
    decode: DecodeCount = None,
    port: Port = ports.ROUTER,
    http_port: HttpPort = None,
    store: Store = "memory",
    store_pool: StorePool = 0.0,
    tensor_parallel: TensorParallel = "1",
    devices: Devices = "",
    cpu_threads: CpuThreads = 1,
    served_model_name: ServedModelName = "",
    max_model_len: MaxModelLen = 0,
    max_num_seqs: MaxNumSeqs = 0,
    max_num_batched_tokens: MaxNumBatchedTokens = 0,
    dtype: Dtype = "",
    gpu_memory_utilization: GpuMemoryUtilization = 0.0,
    quantization: Quantization = "",
    enable_lora: EnableLora = False,
    lora_modules: LoraModules = None,
    trust_remote_code: TrustRemoteCode = False,
    settings: Settings = None,
    logs: Logs = None,
    planner: Annotated[
        bool,
        option(
            "Start a planner, which adds and removes workers as the load asks for.", "--planner"
        ),
    ] = False,
) -> None:
    """Starts registry, router and workers on this machine, and stops them on Ctrl-C."""

    topology = topology_of(
        engine,
        model,
        (prefill, decode, workers),
        tensor_parallel,
        settings,
        {
            "max_model_len": max_model_len,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "dtype": dtype,
            "gpu_memory_utilization": gpu_memory_utilization,
            "quantization": quantization,
            "enable_lora": enable_lora,
            "lora_modules": lora_modules or [],
            "trust_remote_code": trust_remote_code,
        },
        served_model_name=served_model_name,
        port=port,
        http_port=http_port_of(port, http_port),
        status_port=status_port_of(port),
        store=store,
        cpu_threads=cpu_threads,
        pool_gib=store_pool,
        planner=planner,
        devices=parse_devices(devices) if devices else (),
    )
    await run_up(topology, logs, notice_console())


def topology_of(
    engine: str,
    model: str,
    counts: tuple[int | None, int | None, int],
    tensor_parallel: str,
    settings: list[str] | None,
    engine_flags: Mapping[str, Any] = MappingProxyType({}),
    **others: Any,
) -> Topology:
    """The topology that the options describe. `counts` are of prefill, decode and both roles.

    `engine_flags` are vLLM's, by its names. `others` are fields of a Topology. Raises ConfigError.
    """
    for name, value in {**engine_flags, **others}.items():
        if engine == SIM and value and name in VLLM_FLAGS:
            raise ConfigError(f"--{name.replace('_', '-')} is for --engine vllm: leave it out")
    prefill_count, decode_count, worker_count = counts
    default = 0 if worker_count else 1
    prefill_ranks, decode_ranks = parse_ranks(tensor_parallel)
    folder = model if engine == SIM else named_model(model)
    if not folder and engine != SIM and DEFAULT_MODEL.is_dir():
        folder = str(DEFAULT_MODEL)
    return Topology(
        engine=engine,
        model=folder,
        prefill_count=default if prefill_count is None else prefill_count,
        decode_count=default if decode_count is None else decode_count,
        worker_count=worker_count,
        prefill_tensor_parallel=prefill_ranks,
        decode_tensor_parallel=decode_ranks,
        settings=tuple(engine_settings(map(parse_setting, settings or ()), engine_flags)),
        **others,
    )


TRACE_WAIT_S = 5.0
DEFAULT_PROMPT = "What is the capital of France?"


@command(
    "demo",
    "headrace demo   |   headrace demo 'Name three rivers.'   |   headrace demo --engine sim",
)
async def demo(
    prompt: Annotated[str, typer.Argument(envvar="PROMPT", help="Prompt to run.")] = DEFAULT_PROMPT,
    engine: Engine = "vllm",
    model: Model = "",
    settings: Settings = None,
    logs: Logs = None,
    max_tokens: MaxTokens = 64,
) -> None:
    """Starts everything, runs one prompt, shows where the time went, and stops everything."""

    topology = topology_of(engine, model, (None, None, 0), "1", settings, port=0)
    options = ChatOptions(max_tokens=max_tokens, temperature=0.0)
    question = prompt.strip() or DEFAULT_PROMPT
    await run_demo(topology, logs, question, options, (answer_console(), notice_console()))


async def run_demo(
    topology: Topology,
    folder: Path | None,
    prompt: str,
    options: ChatOptions,
    consoles: tuple[Console, Console],
) -> None:
    """Runs the demo. Raises HeadraceError when any step fails. `consoles` are for answers and notices."""
    _, notices = consoles
    with Signals() as signals:
        async with deployed(topology, folder, notices, signals) as deployment:
            notices.print(f"\n[bold]{len(deployment.children)} processes are ready. {prompt}[/]")
            await signals.unless_stopped(_ask_and_show(deployment, prompt, options, consoles))
            notices.print("stopping")
        notices.print("all stopped")


async def _ask_and_show(
    deployment: Deployment,
    prompt: str,
    options: ChatOptions,
    consoles: tuple[Console, Console],
) -> None:
    answers, notices = consoles
    async with (
        open_router(deployment.router) as router,
        open_router_internally(deployment.router_internal) as operator,
    ):
        answer = await chat_once(router, prompt, options)
        notices.print(summary(answer), style="dim")
        trace = await operator.trace(answer.trace_id, TRACE_WAIT_S)
        answers.print()
        show_trace(trace, answers, layers=False)


@command("add", "headrace add decode", cls=AddressedCommand)
def add(
    role: Annotated[str, typer.Argument(metavar="ROLE", help="prefill, decode or worker.")],
    router: Router = DEFAULT_ROUTER,
) -> None:
    """Adds a worker to a deployment of `headrace up`, with the settings of its start. `headrace drain` ends one."""
    notice_console().print(add_worker(router, role), markup=False)


def add_worker(router: str, role: str) -> str:
    """Returns when the worker serves. Raises ConfigError for another role.

    Raises WorkerGone without a deployment, and for a worker that could not be added.
    """
    if role not in WORKER_SERVICES:
        raise ConfigError(f"{role!r} is no role: give {', '.join(WORKER_SERVICES)}")
    folder = default_folder(router_port(router))
    if read_state(router) is None or not is_locked(folder):
        raise nothing_serves(router)
    request = folder / f"{secrets.token_hex(8)}.part"
    request.write_text(role, encoding="utf-8")
    request = request.rename(request.with_suffix(ADD_REQUEST))
    answer = request.with_suffix(ADD_ANSWER)
    while not answer.exists():
        if not is_locked(folder):
            request.unlink(missing_ok=True)
            raise nothing_serves(router)
        time.sleep(_POLL_S)
    text = answer.read_text(encoding="utf-8")
    answer.unlink()
    if text.startswith(ADD_FAILED):
        raise WorkerGone(text.removeprefix(ADD_FAILED))
    return text


@command("down", "headrace down", cls=AddressedCommand)
def down(
    router: Router = DEFAULT_ROUTER,
    timeout: Annotated[
        float, option("Time until everything has ended.", metavar="SECONDS", min=0)
    ] = 60.0,
) -> None:
    """Ends a deployment of `headrace up` as Ctrl-C does, and waits until it has ended."""
    end_deployment(router, timeout)
    notice_console().print(f"the deployment on {router} has ended", markup=False)


def end_deployment(router: str, timeout_s: float) -> None:
    """Raises WorkerGone without a deployment, and DeadlineExceeded when it has not ended in time."""
    state = read_state(router)
    folder = default_folder(router_port(router))
    if state is None or not is_locked(folder):
        raise nothing_serves(router)
    try:
        os.kill(state.pid, signal.SIGTERM)
    except ProcessLookupError:
        raise nothing_serves(router) from None
    except PermissionError:
        raise HeadraceError(
            f"process {state.pid} belongs to another user: end it as that user"
        ) from None
    deadline_s = time.monotonic() + timeout_s
    while is_locked(folder):
        if time.monotonic() >= deadline_s:
            raise DeadlineExceeded(
                f"process {state.pid} has not ended within {timeout_s:g} s; its logs are in {state.logs}"
            )
        time.sleep(_POLL_S)
