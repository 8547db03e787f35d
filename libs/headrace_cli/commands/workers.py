"""`headrace workers` and `headrace reset-cache`: the members, and their prefix caches."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from headrace.registry.v1 import registry_pb2
from headrace_cli.addressed import AddressedCommand
from headrace_cli.client import list_members, reset_prefix_cache
from headrace_cli.completion import complete_workers
from headrace_cli.console import answer_console
from headrace_cli.exit_status import run_command
from headrace_cli.json_output import Json, print_json
from headrace_cli.members.rows import member_rows
from headrace_cli.members.view import workers_object, workers_view
from headrace_cli.members.watch import watch_objects, watch_table
from headrace_cli.options import DEFAULT_ROUTER, Registry, Router
from headrace_cli.starting import WAIT_S, Wait, registry_of
from headrace_common.errors import NotFound


def register(app: typer.Typer) -> None:
    """Adds `headrace workers` and `headrace reset-cache`."""
    app.command(
        cls=AddressedCommand,
        epilog="Examples:  headrace workers   |   headrace workers --watch   |   "
        "headrace workers --registry 127.0.0.1:7051 --json",
    )(workers)
    app.command(
        "reset-cache",
        cls=AddressedCommand,
        epilog="Examples:  headrace reset-cache decode-0   |   "
        "headrace reset-cache prefill-0 decode-0 --timeout 30",
    )(reset_cache)


def workers(
    router: Router = DEFAULT_ROUTER,
    registry: Registry = "",
    wait: Wait = WAIT_S,
    as_json: Json = False,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Show it again until Ctrl-C.")
    ] = False,
    interval: Annotated[
        float, typer.Option(min=0.1, max=3600, help="With --watch: seconds between two looks.")
    ] = 2.0,
) -> None:
    """Lists the registered processes and the state of each worker."""

    async def work() -> None:
        found = await registry_of(router, registry)
        read = partial(member_rows, found)
        if watch and as_json:
            await watch_objects(found, read, interval)
        elif watch:
            await watch_table(read, answer_console(), interval)
        elif as_json:
            print_json(workers_object(found, await read()))
        else:
            console = answer_console()
            console.print(workers_view(await read(), console))

    run_command(work())


def reset_cache(
    worker_ids: Annotated[
        list[str],
        typer.Argument(metavar="WORKER...", help="Worker ids.", autocompletion=complete_workers),
    ],
    router: Router = DEFAULT_ROUTER,
    registry: Registry = "",
    timeout: Annotated[
        float, typer.Option(min=0.5, max=60, help="Seconds to wait for running requests.")
    ] = 10.0,
    wait: Wait = WAIT_S,
    as_json: Json = False,
) -> None:
    """Empties workers' prefix caches; routers are notified at once."""

    async def work() -> None:
        await reset_caches(await registry_of(router, registry), worker_ids, timeout)
        if as_json:
            print_json({"workers": worker_ids})

    run_command(work())


async def reset_caches(registry: str, worker_ids: list[str], timeout_s: float) -> None:
    """Empties the prefix caches of these workers. Raises NotFound, and empties none, for an unknown worker."""
    members = {member.worker_id: member for member in await list_members(registry)}
    for worker_id in worker_ids:
        if worker_id not in members or members[worker_id].role == registry_pb2.Member.ROLE_ROUTER:
            raise NotFound(
                f"no worker {worker_id} is registered: `headrace workers` lists them",
                metadata={"worker_id": worker_id},
            )
    for worker_id in worker_ids:
        await reset_prefix_cache(members[worker_id].endpoint, timeout_s)
