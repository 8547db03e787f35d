"""`headrace profile`: measures a worker, and writes the table that the planner and the simulator read."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final

import typer

from headrace.registry.v1 import registry_pb2
from headrace_cli.addressed import AddressedCommand
from headrace_cli.client import list_members, open_router, worker_status
from headrace_cli.console import notice_console
from headrace_cli.exit_status import run_command
from headrace_cli.options import DEFAULT_ROUTER, Registry, RequestModel, Router
from headrace_cli.profile.measure import ProfileGrid, Profiler, WorkerSize
from headrace_cli.starting import WAIT_S, Wait, registry_of
from headrace_common.errors import ConfigError, InternalError
from headrace_common.version import version
from headrace_planner.profile import WorkerProfile

_PROMPT_TOKENS: Final = (64, 256, 1_024)
_CONTEXT_TOKENS: Final = (64, 512)
_CONCURRENCIES: Final = (1, 2, 4, 8)
_POINTS_MAX: Final = 32


def register(app: typer.Typer) -> None:
    """Adds `headrace profile`."""
    app.command(
        cls=AddressedCommand,
        epilog="Example:  headrace up --prefill 1 --decode 1   |   headrace profile --output profile.json",
    )(profile)


def profile(  # noqa: PLR0913, PLR0917 - typer makes an option of each
    output: Annotated[Path, typer.Option(metavar="FILE", help="File for the profile, as JSON.")],
    router: Router = DEFAULT_ROUTER,
    registry: Registry = "",
    model: RequestModel = "",
    prompt_tokens: Annotated[
        list[int] | None,
        typer.Option(min=2, help="Length of prompts for prefill; may be repeated."),
    ] = None,
    context_tokens: Annotated[
        list[int] | None, typer.Option(min=2, help="Length of prompts for decode; may be repeated.")
    ] = None,
    concurrency: Annotated[
        list[int] | None, typer.Option(min=1, help="Answers at the same time; may be repeated.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, max=100, help="Measurements of each point.")] = 3,
    answer_tokens: Annotated[
        int, typer.Option(min=2, max=100_000, help="Tokens of each answer that are measured.")
    ] = 32,
    fastest: Annotated[
        bool,
        typer.Option(
            "--fastest", help="Take the fastest repeat for prefill, on a machine with other load."
        ),
    ] = False,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for one point.")] = 600,
    seed: Annotated[int, typer.Option(min=0, help="Equal seeds make equal prompts.")] = 0,
    wait: Wait = WAIT_S,
) -> None:
    """Measures an idle deployment of one prefill and one decode worker. Other requests falsify the result."""

    async def work() -> None:
        if not output.absolute().parent.is_dir():
            raise ConfigError(f"{output} cannot be written: its folder does not exist; make it")
        grid = ProfileGrid(
            tuple(prompt_tokens or _PROMPT_TOKENS),
            tuple(context_tokens or _CONTEXT_TOKENS),
            tuple(concurrency or _CONCURRENCIES),
            repeats,
            answer_tokens,
            timeout,
            seed,
            fastest,
        )
        for name in ("prompt_lengths", "contexts", "concurrencies"):
            if len(getattr(grid, name)) > _POINTS_MAX:
                raise ConfigError(f"at most {_POINTS_MAX} {name} can be measured: give fewer")
        size = await worker_size(await registry_of(router, registry), model)
        grid.check(size)
        notices = notice_console()
        async with open_router(router) as client:
            profiler = Profiler(client.generate, size, grid, notices.print)
            measured = await _measured(profiler, size, grid)
        text = json.dumps(measured.model_dump(mode="json"), indent=1)
        output.write_text(f"{text}\n", encoding="utf-8")
        notices.print(f"wrote {output}")

    run_command(work())


async def worker_size(registry: str, model: str) -> WorkerSize:
    """The size of the only decode worker of a model. Raises ConfigError when there are several workers of a role."""
    members = [one for one in await list_members(registry) if not model or one.model == model]
    prefill = [one for one in members if one.role == registry_pb2.Member.ROLE_PREFILL]
    decode = [one for one in members if one.role == registry_pb2.Member.ROLE_DECODE]
    if len(prefill) != 1 or len(decode) != 1:
        raise ConfigError(
            f"{len(prefill)} prefill and {len(decode)} decode workers serve: a profile is that of one each; "
            "start `headrace up --prefill 1 --decode 1`, or name a --model with one each"
        )
    (worker,) = decode
    status = await worker_status(worker.endpoint)
    block_tokens = worker.layout.groups[0].block_tokens if worker.layout.groups else 0
    if not status.total_blocks or not block_tokens:
        raise InternalError(f"{worker.worker_id} does not report the size of its KV memory")
    return WorkerSize(
        worker.model, worker.max_model_len, worker.max_num_seqs, status.total_blocks * block_tokens
    )


async def _measured(profiler: Profiler, size: WorkerSize, grid: ProfileGrid) -> WorkerProfile:
    prefill = await profiler.prefill_points()
    decode = await profiler.decode_points()
    if not decode:
        raise ConfigError(
            "no answers of these lengths fit into the worker together: give a shorter --context-tokens"
        )
    return WorkerProfile(
        prefill=prefill,
        decode=decode,
        kv_tokens=size.kv_tokens,
        max_num_seqs=size.max_num_seqs,
        measured=(
            f"headrace {version()}, {datetime.now(UTC).isoformat(timespec='seconds')}, model {size.model}: "
            f"{'the fastest' if grid.fastest else 'medians'} of {grid.repeats}, seed {grid.seed}, "
            f"{grid.answer_tokens} tokens of each answer. The time to first token contains the hand-over and the first "
            "decode step."
        ),
    )
