"""Commands wait for a deployment that is starting: its addresses, its services and its workers appear one by one."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Annotated, Final, TypeVar

import typer

from headrace_cli.output import notice_console
from headrace_cli.state import find_registry
from headrace_common.config import split_host_port
from headrace_common.deadlines import Deadline
from headrace_common.errors import HeadraceError, NotFound

_T = TypeVar("_T")

WAIT_S: Final = 10.0
_POLL_S: Final = 0.1
# To an address that neither accepts nor refuses. The call itself reports it.
_CONNECT_S: Final = 1.0
_waits_until: ContextVar[Deadline | None] = ContextVar("waits_until", default=None)


def _begin_wait(seconds: float) -> float:
    _waits_until.set(Deadline.after(seconds) if seconds else None)
    return seconds


Wait = Annotated[
    float,
    typer.Option(
        "--wait",
        metavar="SECONDS",
        min=0,
        callback=_begin_wait,
        help="Time that a deployment which is starting has until it can answer; 0 fails at once.",
    ),
]
"""An option of every command that calls a service. It bounds all waits of the command together."""


async def wait_until_started(endpoint: str) -> None:
    """Returns when `endpoint` does not refuse connections, or when the command has waited as long as it may.

    A command without the option Wait does not wait. The call that follows reports what is still wrong.
    """
    deadline = _waits_until.get()
    if deadline is None:
        return
    has_noted = False
    while not deadline.expired and await asyncio.to_thread(_refuses, endpoint):
        if not has_noted:
            has_noted = True
            _note(f"{endpoint} refuses connections", deadline)
        await asyncio.sleep(min(_POLL_S, deadline.remaining_s()))


async def once_possible(attempt: Callable[[], Awaitable[_T]], missing: type[HeadraceError]) -> _T:
    """What `attempt` returns. It is repeated after an error `missing`, for as long as the command may wait."""
    deadline = _waits_until.get()
    has_noted = False
    while True:
        try:
            return await attempt()
        except missing as error:
            if deadline is None or deadline.expired:
                raise
            if not has_noted:
                has_noted = True
                _note(error.detail, deadline)
        await asyncio.sleep(min(_POLL_S, deadline.remaining_s()))


async def registry_of(router: str, registry: str = "") -> str:
    """`registry`, or else the registry of the deployment on this machine with this router. Raises NotFound."""

    async def find() -> str:
        return find_registry(router)

    return registry or await once_possible(find, NotFound)


def _note(state: str, deadline: Deadline) -> None:
    notice_console().print(
        f"headrace: {state}; waiting up to {deadline.remaining_s():.0f} s for it to start",
        markup=False,
    )


def _refuses(endpoint: str) -> bool:
    host, port = split_host_port(endpoint)
    try:
        socket.create_connection((host.strip("[]"), port), _CONNECT_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False
