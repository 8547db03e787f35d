"""`headrace workers`, `status`, `reset-cache`, `drain`, `move`: the members, and what operators do to them."""

from __future__ import annotations

import asyncio
from typing import Annotated, Final

import grpc
import grpc.aio
import typer
from rich.console import Console

from headrace.inference.v1 import inference_pb2, inference_pb2_grpc
from headrace.registry.v1 import registry_pb2
from headrace.worker.v1 import worker_pb2, worker_pb2_grpc
from headrace_cli.client import (
    CALL_TIMEOUT_S,
    WAIT_S,
    Wait,
    call_channel,
    list_members,
    open_router,
    registry_of,
    reset_prefix_cache,
    rpc_errors,
)
from headrace_cli.members import (
    member_rows,
    workers_object,
    workers_view,
)
from headrace_cli.options import (
    DEFAULT_ROUTER,
    AddressedCommand,
    Registry,
    Router,
)
from headrace_cli.output import Json, answer_console, command, message_object, option, print_json
from headrace_common import ports
from headrace_common.access.credentials import Credentials
from headrace_common.access.roles import Role
from headrace_common.config import WILDCARD_HOSTS
from headrace_common.deadlines import Deadline
from headrace_common.durations import duration_from_seconds, seconds_from_duration
from headrace_common.errors import (
    ConfigError,
    DeadlineExceeded,
    HeadraceError,
    NotFound,
    WorkerGone,
)
from headrace_common.limits import DRAIN_GRACE_MAX_S
from headrace_common.ports import split_host_port
from headrace_common.registry.duties import WORKERS
from headrace_common.rpc.server import DRAIN_OVERRUN_MAX_S

# After its last request a process still stops its engine.
_ENGINE_STOP_S: Final = 10.0
_MOVE_TIMEOUT_S: Final = 60.0


async def drain_worker(
    registry: str,
    worker_id: str,
    grace_s: float | None,
    *,
    wait: bool,
    console: Console | None,
    keep_answers: bool = False,
) -> worker_pb2.DrainResponse:
    """Drains a worker. With `wait`, returns when it has ended. Shows its steps on `console`.

    Raises NotFound for an id that no worker has, DeadlineExceeded when it does not end.
    """
    member = await _find(registry, worker_id)
    async with call_channel(member.endpoint) as channel:
        request = worker_pb2.DrainRequest(incarnation=member.incarnation, keep_answers=keep_answers)
        if grace_s is not None:
            request.grace.CopyFrom(duration_from_seconds(grace_s))
        with rpc_errors(f"worker {worker_id} on {member.endpoint}"):
            begun = await worker_pb2_grpc.WorkerServiceStub(channel).Drain(
                request, timeout=CALL_TIMEOUT_S
            )
        remaining_s = seconds_from_duration(begun.remaining)
        if console is not None:
            console.print(
                f"{worker_id} drains: {begun.request_count} requests in flight, up to {remaining_s:.0f} s"
            )
        if wait:
            await _wait_gone(channel, worker_id, remaining_s + DRAIN_OVERRUN_MAX_S + _ENGINE_STOP_S)
            if console is not None:
                console.print(f"{worker_id} has ended")
    return begun


async def _find(registry: str, worker_id: str) -> registry_pb2.Member:
    workers = {
        member.worker_id: member
        for member in await list_members(registry)
        if member.role in WORKERS
    }
    if worker_id not in workers:
        known = ", ".join(sorted(workers)) or "none"
        raise NotFound(
            f"no worker is registered as {worker_id}; there are: {known}",
            metadata={"worker_id": worker_id},
        )
    return workers[worker_id]


async def _wait_gone(channel: grpc.aio.Channel, worker_id: str, timeout_s: float) -> None:
    """Waits until the worker's port is closed. Its status stream ends a moment earlier."""
    deadline = Deadline.after(timeout_s)
    stub = worker_pb2_grpc.WorkerServiceStub(channel)
    while True:
        try:
            async for _ in stub.WatchStatus(
                worker_pb2.WatchStatusRequest(), timeout=deadline.remaining_s()
            ):
                pass
        except grpc.aio.AioRpcError as error:
            if deadline.expired:
                raise DeadlineExceeded(
                    f"{worker_id} has not ended within {timeout_s:.0f} s",
                    metadata={"worker_id": worker_id},
                ) from error
            if error.code() is grpc.StatusCode.UNAVAILABLE and "DRAINING" not in str(
                error.trailing_metadata()
            ):
                return
        await asyncio.sleep(0.1)


@command(
    "drain",
    "headrace drain decode-0   |   headrace drain prefill-1 --grace 120 --no-wait",
    cls=AddressedCommand,
)
async def drain(
    worker: Annotated[
        str,
        typer.Argument(help="Its id, as `headrace workers` shows it."),
    ],
    router: Router = DEFAULT_ROUTER,
    registry: Registry = "",
    grace: Annotated[
        float | None,
        option(
            "Seconds that its requests may take; the rest continues elsewhere.",
            min=0,
            max=DRAIN_GRACE_MAX_S,
            show_default="the worker's drain_grace_s",
        ),
    ] = None,
    no_wait: Annotated[
        bool, option("Return at once, not when the worker has ended.", "--no-wait")
    ] = False,
    keep_answers: Annotated[
        bool,
        option("Its answers end on it, rather than move to others.", "--keep-answers"),
    ] = False,
    wait: Wait = WAIT_S,
    as_json: Json = False,
) -> None:
    """Ends a worker as SIGTERM does: it rejects new requests, its answers move to others or end, and it exits."""

    found = await registry_of(router, registry)
    console = None if as_json else answer_console()
    begun = await drain_worker(
        found, worker, grace, wait=not no_wait, console=console, keep_answers=keep_answers
    )
    if as_json:
        print_json({"worker": worker, **message_object(begun), "ended": not no_wait})


@command(
    "move",
    "headrace move REQUEST decode-1   |   headrace move REQUEST --any",
    cls=AddressedCommand,
)
async def move(
    request: Annotated[str, typer.Argument(help="Id of a running request, or of its response.")],
    worker: Annotated[
        str,
        typer.Argument(help="The decode worker for it."),
    ] = "",
    any_worker: Annotated[bool, option("Let the router choose the worker.", "--any")] = False,
    router: Router = DEFAULT_ROUTER,
    registry: Registry = "",
    wait: Wait = WAIT_S,
    as_json: Json = False,
) -> None:
    """Moves a running answer to another decode worker. One that cannot move goes on where it is."""

    if any_worker == bool(worker):
        raise ConfigError("name a decode worker, or give --any")
    moved = await move_answer(await registry_of(router, registry), request, worker)
    if as_json:
        print_json(message_object(moved))
        return
    for one in moved.moves:
        answer_console().print(
            f"{request} moved from {one.source_worker_id} to {one.target_worker_id}: {one.payload_bytes:,} bytes, "
            f"{one.gap_us / 1e3:.1f} ms without a token"
        )


async def move_answer(
    registry: str, request_id: str, worker_id: str
) -> inference_pb2.MoveAnswerResponse:
    """Asks the router that has the request. Raises its error."""
    members = await list_members(registry)
    asked = inference_pb2.MoveAnswerRequest(request_id=request_id, worker_id=worker_id)
    failed: HeadraceError = NotFound("no router is registered")
    for member in members:
        if member.role == registry_pb2.Member.ROLE_ROUTER:
            async with call_channel(member.endpoint) as channel:
                stub = inference_pb2_grpc.InferenceServiceStub(channel)
                try:
                    with rpc_errors(f"the router on {member.endpoint}"):
                        return await stub.MoveAnswer(asked, timeout=_MOVE_TIMEOUT_S)
                except (NotFound, WorkerGone) as error:
                    # What a router has tried says more than that others do not have the request.
                    failed = error if isinstance(failed, NotFound) else failed
    raise failed


@command(
    "workers",
    "headrace workers   |   headrace workers --registry 127.0.0.1:7051 --json",
    cls=AddressedCommand,
)
async def workers(
    router: Router = DEFAULT_ROUTER,
    registry: Registry = "",
    wait: Wait = WAIT_S,
    as_json: Json = False,
) -> None:
    """Lists the registered processes and the state of each worker."""

    found = await registry_of(router, registry)
    rows = await member_rows(found)
    if as_json:
        print_json(workers_object(found, rows))
    else:
        console = answer_console()
        console.print(workers_view(rows, console))


@command(
    "reset-cache",
    "headrace reset-cache decode-0   |   headrace reset-cache prefill-0 decode-0 --timeout 30",
    cls=AddressedCommand,
)
async def reset_cache(
    worker_ids: Annotated[
        list[str],
        typer.Argument(metavar="WORKER...", help="Worker ids."),
    ],
    router: Router = DEFAULT_ROUTER,
    registry: Registry = "",
    timeout: Annotated[
        float, option("Seconds to wait for running requests.", min=0.5, max=60)
    ] = 10.0,
    wait: Wait = WAIT_S,
    as_json: Json = False,
) -> None:
    """Empties workers' prefix caches; routers are notified at once."""

    await reset_caches(await registry_of(router, registry), worker_ids, timeout)
    if as_json:
        print_json({"workers": worker_ids})


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


@command(
    "status",
    "headrace status   |   headrace status router-0.example:7057 --json",
    cls=AddressedCommand,
)
async def status(
    address: Annotated[
        str,
        typer.Argument(
            metavar="[HOST:PORT]",
            help="The router's status_listen; empty means as the router has it.",
        ),
    ] = "",
    router: Router = DEFAULT_ROUTER,
    wait: Wait = WAIT_S,
    as_json: Json = False,
) -> None:
    """Prints the address of a router's status page, with this operator's token: keep it secret."""

    found = address or await find_page(router)
    url = page_url(found, Credentials.from_environment(Role.OPERATOR))
    if as_json:
        print_json({"url": url})
    else:
        answer_console().print(url, soft_wrap=True, markup=False, highlight=False)


async def find_page(router: str) -> str:
    """The address of the router's status page. Raises NotFound where it has none."""
    async with open_router(router) as client:
        listen = (await client.listing()).status_endpoint
    host, port = split_host_port(listen) if listen else ("", 0)
    if not port:
        raise NotFound(
            f"the router on {router} has no status page with a fixed port: set its status_listen, as with `headrace "
            f"up --set router.status_listen=127.0.0.1:{ports.ROUTER_STATUS}`",
            metadata={"router": router},
        )
    return f"{split_host_port(router)[0] if host in WILDCARD_HOSTS else host}:{port}"


def page_url(address: str, credentials: Credentials) -> str:
    """The page's URL. Browsers do not send the part with the token. Raises ConfigError."""
    try:
        split_host_port(address)
    except ValueError as error:
        raise ConfigError(f"{address!r} is no address of a status page: {error}") from error
    scheme = "https" if credentials.tls.encrypts else "http"
    token = credentials.page_token(address)
    return f"{scheme}://{address}/" + (f"#token={token}" if token else "")
