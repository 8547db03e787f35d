"""`headrace incident`: stores the last events of a deployment in a file, draws them, and replays the decisions."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from headrace.incident.v1 import incident_pb2, incident_pb2_grpc
from headrace.registry.v1 import registry_pb2
from headrace_cli.client import WAIT_S, Wait, call_channel, list_members, registry_of, rpc_errors
from headrace_cli.commands.simulate import run_module
from headrace_cli.options import DEFAULT_ROUTER, Registry, Router
from headrace_cli.output import (
    Column,
    Json,
    answer_console,
    command,
    fitted_table,
    notice_console,
    option,
    print_json,
)
from headrace_common.durations import duration_from_seconds
from headrace_common.errors import ConfigError, HeadraceError
from headrace_common.process.events import incident_writer
from headrace_simulator.incident_file import Parts, read_incident

_SAVE_S: Final = 60.0
_REPLAY_S: Final = 600.0
_BUCKETS: Final = 48
_BLOCKS: Final = " ▁▂▃▄▅▆▇█"
_NOTED_KINDS: Final = ("Alarm", "LogLine", "TaskDone")
_NOTED: Final = ("WARNING", "ERROR", "CRITICAL")
_NOTES_MAX: Final = 40


File = Annotated[Path, typer.Argument(metavar="FILE", help="A file of `headrace incident save`.")]


@command(
    "incident save",
    "headrace incident save --output stall.incident   |   headrace incident save --output all.incident --last 0",
)
async def save(
    output: Annotated[
        Path, option("The file to write. It has no text of requests.", metavar="FILE")
    ],
    last: Annotated[
        float, option("Minutes that the events go back; 0: all that are stored.", min=0)
    ] = 10.0,
    router: Router = DEFAULT_ROUTER,
    registry: Registry = "",
    wait: Wait = WAIT_S,
) -> None:
    """Writes the last events of all members and of the registry to a file."""
    found = await registry_of(router, registry)
    members = await list_members(found)
    members.append(registry_pb2.Member(worker_id="registry", endpoint=found))
    try:
        with incident_writer(output) as write:
            counts = await asyncio.gather(*(_save(one, last * 60, write) for one in members))
    except OSError as error:
        raise ConfigError(f"cannot write {output}: {error.strerror}") from error
    answer_console().print(
        f"{output}: {sum(counts)} events of {len(members)} members, {output.stat().st_size} bytes",
        markup=False,
    )


async def _save(
    member: registry_pb2.Member,
    last_s: float,
    write: Callable[[incident_pb2.ListEventsResponse], None],
) -> int:
    """Writes the events of a member as they come. Returns their number."""
    request = incident_pb2.ListEventsRequest()
    if last_s:
        request.last.CopyFrom(duration_from_seconds(last_s))
    about = registry_pb2.Member(
        worker_id=member.worker_id,
        incarnation=member.incarnation,
        role=member.role,
        version=member.version,
    )
    count = 0
    try:
        async with call_channel(member.endpoint) as channel:
            with rpc_errors(f"{member.worker_id} on {member.endpoint}"):
                stub = incident_pb2_grpc.IncidentServiceStub(channel)
                async for part in stub.ListEvents(request, timeout=_SAVE_S):
                    part.member.CopyFrom(about)
                    write(part)
                    count += len(part.events)
    except HeadraceError as error:
        failed = f"{member.worker_id} is left out after {count} events: {error.detail}"
        notice_console().print(failed, markup=False)
    return count


@command("incident show", "headrace incident show stall.incident")
def show(file: File) -> None:
    """Draws the events of each member over time, and lists alarms, warnings and failed placements."""
    members = read_incident(file)
    console = answer_console()
    found = [
        ((event.monotonic_ns + part.clock_offset_ns) / 1e9, name, event)
        for name, parts in members.items()
        for part in parts
        for event in part.events
    ]
    if not found:
        console.print("The file has no events.")
        return
    begin_s, end_s = min(one[0] for one in found), max(one[0] for one in found)
    notes = [(at_s, name, note) for at_s, name, event in found if (note := _note(event))]
    rows = []
    for name in members:
        times = [at_s for at_s, other, _ in found if other == name]
        warnings = sum(other == name for _, other, _ in notes)
        drawn = _drawn(times, begin_s, end_s)
        rows.append((name, drawn, str(len(times)), str(warnings)))
    columns = (
        Column("Member"),
        Column(f"Events, {_time(begin_s)} to {_time(end_s)}"),
        Column("Events", right=True),
        Column("Warnings", right=True),
    )
    console.print(fitted_table(console, columns, rows)[0])
    for at_s, name, note in sorted(notes)[-_NOTES_MAX:]:
        console.print(f"{_time(at_s)} {name}: {note}", markup=False)


def _drawn(times: Sequence[float], begin_s: float, end_s: float) -> str:
    """How many events there were, by time."""
    width_s = max(1e-3, (end_s - begin_s) / _BUCKETS)
    counts = Counter(min(_BUCKETS - 1, int((at_s - begin_s) / width_s)) for at_s in times)
    most = max(counts.values(), default=1)
    top = len(_BLOCKS) - 1
    return "".join(_BLOCKS[-(-counts[bucket] * top // most)] for bucket in range(_BUCKETS))


def _time(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%H:%M:%S.%f")[:-3]


def _note(event: incident_pb2.Event) -> str:
    """What an operator should read. Empty: nothing."""
    if event.kind not in _NOTED_KINDS:
        return ""
    # Another release may have other events.
    with suppress(ValueError, KeyError, TypeError):
        value = json.loads(event.value)
        if event.kind == "Alarm":
            return f"alarm: {value['reason']}"
        if event.kind == "LogLine" and value["level"] in _NOTED:
            return f"{value['level']} {value['message']}"
        if event.kind == "TaskDone" and "reason" in value:
            return f"task {value['transferId']} failed: {value['reason']}"
    return ""


@command("incident replay", "headrace incident replay stall.incident")
def replay(file: File, as_json: Json = False) -> None:
    """Lets placement, queue and admission decide again by the recorded events, and names the first difference.

    Exits with 1 when a decision differs.
    """
    members = read_incident(file)
    results = run_module("headrace_simulator.incident", str(file), limit_s=_REPLAY_S)
    if as_json:
        print_json(results)
    else:
        _print_replay(members, results)
    if any(kind["differing"] for kinds in results.values() for kind in kinds.values()):
        raise typer.Exit(1)


def _print_replay(members: dict[str, Parts], results: dict[str, dict[str, Any]]) -> None:
    console = answer_console()
    rows: list[Sequence[str]] = []
    for name, kinds in results.items():
        offset_ns = members[name][0].clock_offset_ns
        for kind, one in kinds.items():
            first = ""
            if one["differing"]:
                first = f"{_time((one['first_ns'] + offset_ns) / 1e9)} {one['first']}"
            rows.append((name, kind, str(one["compared"]), str(one["differing"]), first))
    columns = (
        Column("Router"),
        Column("Decisions of"),
        Column("Compared", right=True),
        Column("Differing", right=True),
        Column("First difference"),
    )
    console.print(fitted_table(console, columns, rows)[0])
