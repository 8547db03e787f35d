"""`headrace demo`: start everything, ask, show where the time went, stop everything."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from headrace_cli.client import open_router
from headrace_cli.commands.chat import Answer, ChatOptions, chat_once, summary
from headrace_cli.commands.trace import show_trace
from headrace_cli.up.topology import Topology
from headrace_cli.up.up import Deployment, Signals, deployed
from headrace_cli.waterfall.waterfall import layer_spans
from headrace_common.errors import InternalError

TRACE_WAIT_S = 5.0
DEFAULT_PROMPT = "What is the capital of France?"


async def run_demo(
    topology: Topology,
    folder: Path | None,
    prompt: str,
    options: ChatOptions,
    consoles: tuple[Console, Console],
) -> None:
    """Returns only when all of it went well; raises HeadraceError otherwise. `consoles`: answers,
    notices.
    """
    _, notices = consoles
    with Signals() as signals:
        async with deployed(topology, folder, notices, signals) as deployment:
            notices.print(f"\n[bold]{len(deployment.children)} processes serve. {prompt}[/]")
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
    async with open_router(deployment.router) as router:
        answer = await chat_once(router, prompt, options)
        notices.print(summary(answer), style="dim")
        trace = await router.trace(answer.trace_id, TRACE_WAIT_S)
        answers.print()
        show_trace(trace, answers, layers=True)
        _check(answer, topology, len(layer_spans(trace)), complete=trace.complete)


def _check(answer: Answer, topology: Topology, write_count: int, *, complete: bool) -> None:
    """Raises InternalError when something that the demo is to show was not there."""
    if answer.last.usage.completion_tokens < 1:
        raise InternalError("the answer is empty")
    if not complete:
        raise InternalError("the trace is not complete")
    if topology.prefill_count and not write_count:
        raise InternalError("no KV cache was transferred")
