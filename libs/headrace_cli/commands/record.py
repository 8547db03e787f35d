"""`headrace record`: writes the load of a router as a trace, for `headrace simulate` and `headrace advise`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

from headrace.inference.v1 import load_pb2
from headrace_cli.client import WAIT_S, Wait, open_router_internally
from headrace_cli.commands.route import find_internal
from headrace_cli.options import DEFAULT_ROUTER, AddressedCommand, Registry, Router, RouterInternal
from headrace_cli.output import notice_console, run_command
from headrace_common.callers.priority import Priority
from headrace_common.durations import unix_ns_from_timestamp
from headrace_common.errors import ConfigError
from headrace_simulator.trace import REQUESTS_MAX, TraceRequest

_DAY_S: Final = 86_400.0
_CLASSES: Final = {one.label: one for one in Priority}


def register(app: typer.Typer) -> None:
    """Adds `headrace record`."""
    app.command(
        cls=AddressedCommand,
        epilog="Example:  headrace record --output load.jsonl --seconds 600   |   "
        "headrace simulate --trace load.jsonl --profile profile.json",
    )(record)


@run_command
async def record(
    output: Annotated[Path, typer.Option(metavar="FILE", help="File for the trace.")],
    seconds: Annotated[
        float, typer.Option(min=1, max=_DAY_S, help="Time after which it ends; or Ctrl-C.")
    ] = _DAY_S,
    router: Router = DEFAULT_ROUTER,
    registry: Registry = "",
    internal: RouterInternal = "",
    wait: Wait = WAIT_S,
) -> None:
    """Records times, lengths, classes and shared prefixes of a router's requests. It records no text.

    The requests are those that arrive and are answered meanwhile.
    """

    _write(output, [])
    found: list[load_pb2.RecordLoadResponse] = []
    endpoint = await find_internal(internal, registry, router)
    try:
        async with open_router_internally(endpoint) as client:
            async for one in client.load(seconds):
                found.append(one)
                if len(found) >= REQUESTS_MAX:
                    break
    finally:
        _write(output, trace_of(found))
        lost = f", and lost {found[-1].lost_records}" if found and found[-1].lost_records else ""
        notice_console().print(f"wrote {len(found)} requests to {output}{lost}", markup=False)


def trace_of(records: Sequence[load_pb2.RecordLoadResponse]) -> list[TraceRequest]:
    """The requests by arrival. The first arrives at 0 s."""
    arrived = sorted(
        (unix_ns_from_timestamp(one.arrival_time), place) for place, one in enumerate(records)
    )
    return [
        TraceRequest(
            number,
            1e-9 * (arrival_ns - arrived[0][0]),
            records[place].prompt_tokens,
            max(1, records[place].answer_tokens),
            # Ids of a trace have 62 bits.
            tuple(one >> 2 for one in records[place].prefix_hashes),
            _CLASSES.get(records[place].priority, Priority.NORMAL),
        )
        for number, (arrival_ns, place) in enumerate(arrived)
    ]


def _write(path: Path, requests: Sequence[TraceRequest]) -> None:
    try:
        path.write_text("".join(one.line() for one in requests), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output {path} cannot be written: {error.strerror}") from None
