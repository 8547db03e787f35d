"""`headrace up`: a whole deployment on this machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from headrace_cli.console import notice_console
from headrace_cli.exit_status import run_command
from headrace_cli.options import (
    DEFAULT_MODEL,
    CpuThreads,
    DecodeCount,
    Engine,
    Logs,
    Model,
    Port,
    PrefillCount,
    Settings,
    Store,
    StorePool,
    TensorParallel,
)
from headrace_cli.up.keeping import run_up
from headrace_cli.up.restarts import NO_RESTARTS, RestartPolicy
from headrace_cli.up.topology import (
    SIM,
    Topology,
    parse_ranks,
    parse_setting,
)
from headrace_common import ports


def register(app: typer.Typer) -> None:
    """Adds `headrace up`."""
    app.command(
        epilog="Examples:  headrace up   |   headrace up --engine sim --prefill 2 --decode 2   |   "
        "headrace up --engine sim --planner   |   "
        "headrace up --model ~/models/SmolLM2-135M-Instruct --set decode.kv_cache_gib=2"
    )(up)


def up(  # noqa: PLR0913, PLR0917 - every option is one of the user's
    engine: Engine = "vllm",
    model: Model = "",
    prefill: PrefillCount = 1,
    decode: DecodeCount = 1,
    port: Port = ports.ROUTER,
    store: Store = "memory",
    store_pool: StorePool = 0.0,
    tensor_parallel: TensorParallel = "1",
    cpu_threads: CpuThreads = 1,
    settings: Settings = None,
    logs: Logs = None,
    restart: Annotated[
        bool,
        typer.Option(
            "--restart/--no-restart", help="Start a killed worker again, or end everything."
        ),
    ] = True,
    planner: Annotated[
        bool,
        typer.Option(
            "--planner",
            help="Start a planner, which adds and removes workers as the load asks for.",
        ),
    ] = False,
) -> None:
    """Starts registry, router and workers on this machine, and stops them on Ctrl-C."""

    async def work() -> None:
        topology = topology_of(
            engine, model, (prefill, decode), port, store, tensor_parallel, cpu_threads, settings
        )
        # Another deployment may have the default one.
        http_port = ports.ROUTER_HTTP if port == ports.ROUTER else 0
        topology = replace(topology, http_port=http_port, pool_gib=store_pool, planner=planner)
        policy = RestartPolicy() if restart else NO_RESTARTS
        await run_up(topology, logs, notice_console(), policy)

    run_command(work())


def topology_of(
    engine: str,
    model: str,
    counts: tuple[int, int],
    port: int,
    store: str,
    tensor_parallel: str,
    cpu_threads: int,
    settings: list[str] | None,
) -> Topology:
    """The topology that the options describe. `counts` are of prefill and decode. Raises ConfigError."""
    prefill_ranks, decode_ranks = parse_ranks(tensor_parallel)
    folder = model
    if not folder and engine != SIM and DEFAULT_MODEL.is_dir():
        folder = str(DEFAULT_MODEL)
    return Topology(
        engine=engine,
        model=folder,
        prefill_count=counts[0],
        decode_count=counts[1],
        port=port,
        store=store,
        prefill_tensor_parallel=prefill_ranks,
        decode_tensor_parallel=decode_ranks,
        cpu_threads=cpu_threads,
        settings=tuple(parse_setting(text) for text in settings or ()),
    )
