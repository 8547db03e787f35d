"""`headrace demo`: starts a deployment, runs one prompt, shows its trace, and stops the deployment."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from headrace_cli.client import open_router, open_router_internally
from headrace_cli.commands.chat import ChatAnswer, ChatOptions, chat_once, summary
from headrace_cli.commands.trace import show_trace
from headrace_cli.commands.up import topology_of
from headrace_cli.console import answer_console, notice_console
from headrace_cli.exit_status import run_command
from headrace_cli.options import (
    CpuThreads,
    DecodeCount,
    Engine,
    Logs,
    MaxTokens,
    Model,
    Port,
    PrefillCount,
    Settings,
    Store,
    TensorParallel,
)
from headrace_cli.up.deployment import Deployment, Signals, deployed
from headrace_cli.up.topology import Topology
from headrace_common.errors import InternalError
from headrace_common.trace_view.reading import read_trace

TRACE_WAIT_S = 5.0
DEFAULT_PROMPT = "What is the capital of France?"


def register(app: typer.Typer) -> None:
    """Adds `headrace demo`."""
    app.command(
        epilog="Examples:  headrace demo   |   headrace demo 'Name three rivers.'   |   "
        "headrace demo --engine sim"
    )(demo)


def demo(  # noqa: PLR0913, PLR0917 - every option is one of the user's
    prompt: Annotated[str, typer.Argument(envvar="PROMPT", help="Prompt to run.")] = DEFAULT_PROMPT,
    engine: Engine = "vllm",
    model: Model = "",
    prefill: PrefillCount = 1,
    decode: DecodeCount = 1,
    port: Port = 0,
    store: Store = "memory",
    tensor_parallel: TensorParallel = "1",
    cpu_threads: CpuThreads = 1,
    settings: Settings = None,
    logs: Logs = None,
    max_tokens: MaxTokens = 64,
) -> None:
    """Starts everything, runs one prompt, shows where the time went, and stops everything."""

    async def work() -> None:
        topology = topology_of(
            engine, model, (prefill, decode), port, store, tensor_parallel, cpu_threads, settings
        )
        options = ChatOptions(max_tokens=max_tokens, temperature=0.0)
        question = prompt.strip() or DEFAULT_PROMPT
        await run_demo(topology, logs, question, options, (answer_console(), notice_console()))

    run_command(work())


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
            await signals.unless_stopped(
                _ask_and_show(deployment, topology, prompt, options, consoles)
            )
            notices.print("stopping")
        notices.print("all stopped")


async def _ask_and_show(
    deployment: Deployment,
    topology: Topology,
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
        writes = sum(len(link.writes) for link in read_trace(trace).links)
        _check(answer, topology, writes, complete=trace.complete)


def _check(answer: ChatAnswer, topology: Topology, write_count: int, *, complete: bool) -> None:
    """Raises InternalError when the demo did not show what it should."""
    if answer.last.usage.completion_tokens < 1:
        raise InternalError("the answer is empty")
    if not complete:
        raise InternalError("the trace is not complete")
    if topology.prefill_count and not write_count:
        raise InternalError("no KV cache was transferred")
