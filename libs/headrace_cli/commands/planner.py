"""`headrace planner`: what a planner has decided, and why."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Final, NamedTuple

from headrace.planner.v1 import planner_pb2, planner_pb2_grpc
from headrace_cli.client import (
    CALL_TIMEOUT_S,
    WAIT_S,
    Wait,
    counts_from_proto,
    rpc_errors,
    started_channel,
    wait_until_started,
)
from headrace_cli.options import DEFAULT_ROUTER, Router, check_address
from headrace_cli.output import (
    Column,
    Json,
    answer_console,
    command,
    fitted_table,
    message_object,
    option,
    print_json,
)
from headrace_cli.state import find_planner
from headrace_common.durations import seconds_from_duration, unix_s_from_timestamp

PLANNER_VARIABLE: Final = "HEADRACE_PLANNER"
_DECISIONS_MAX: Final = 1_000
_EXPLAIN_COLUMNS: Final = (
    Column("Number", rank=2, right=True),
    Column("Time", rank=1),
    Column("Workers", right=True),
    Column("Target", right=True),
    Column("Outcome"),
    Column("Why"),
)


class Explanation(NamedTuple):
    """The state of a planner, and its last decisions, newest first."""

    status: planner_pb2.GetStatusResponse
    decisions: list[planner_pb2.Decision]


@command(
    "planner explain",
    "headrace planner explain   |   headrace planner explain --planner 10.0.0.5:7058 --changes",
)
async def explain(
    planner: Annotated[
        str,
        option(
            "Planner to call; empty means that of `headrace up`.",
            metavar="HOST:PORT",
            envvar=PLANNER_VARIABLE,
        ),
    ] = "",
    router: Router = DEFAULT_ROUTER,
    count: Annotated[
        int, option("Decisions to show, the newest first.", min=1, max=_DECISIONS_MAX)
    ] = 20,
    changes: Annotated[
        bool, option("Of these, show only those that ask for a change.", "--changes")
    ] = False,
    wait: Wait = WAIT_S,
    as_json: Json = False,
) -> None:
    """Shows what a running planner has decided, and why."""

    if planner:
        address = check_address("--planner", planner)
    else:
        await wait_until_started(router)
        address = find_planner(router)
    found = await read_explanation(address, count)
    decisions = [one for one in found.decisions if not changes or one.target != one.current]
    if as_json:
        objects = list(map(message_object, found.decisions))
        print_json(message_object(found.status) | {"decisions": objects})
    else:
        _show_status(found.status, decisions)


async def read_explanation(planner: str, count: int) -> Explanation:
    """The planner's state and its last decisions. Raises HeadraceError when it cannot be reached."""
    async with started_channel(planner) as channel:
        stub = planner_pb2_grpc.PlannerServiceStub(channel)
        with rpc_errors(f"the planner on {planner}"):
            status = await stub.GetStatus(planner_pb2.GetStatusRequest(), timeout=CALL_TIMEOUT_S)
            listed = await stub.ListDecisions(
                planner_pb2.ListDecisionsRequest(page_size=count), timeout=CALL_TIMEOUT_S
            )
    return Explanation(status, list(listed.decisions))


def short_name(name: str) -> str:
    """The end of an enum value's name, such as "advise" of MODE_ADVISE."""
    return name.partition("_")[2].lower()


def _show_status(
    status: planner_pb2.GetStatusResponse, decisions: Sequence[planner_pb2.Decision]
) -> None:
    console = answer_console()
    mode = short_name(planner_pb2.GetStatusResponse.Mode.Name(status.mode))
    interval_s = seconds_from_duration(status.interval)
    line = f"{status.model}, mode {mode}, a decision every {interval_s:g} s"
    if status.HasField("current"):
        line += f": {counts_from_proto(status.current)} now"
    if status.HasField("target"):
        line += f", target {counts_from_proto(status.target.workers)}"
    console.print(line, markup=False, highlight=False)
    if status.observation_fault:
        console.print(f"not observed: {status.observation_fault}", style="red", markup=False)
    console.print(fitted_table(console, _EXPLAIN_COLUMNS, list(map(_cells, decisions)))[0])


def _cells(decision: planner_pb2.Decision) -> tuple[str, ...]:
    start_s = unix_s_from_timestamp(decision.start_time)
    sentences = [reason.sentence for reason in decision.reasons]
    return (
        str(decision.number),
        datetime.fromtimestamp(start_s, UTC).isoformat(timespec="seconds"),
        str(counts_from_proto(decision.current)),
        str(counts_from_proto(decision.target)) if decision.target != decision.current else "",
        short_name(planner_pb2.Decision.Outcome.Name(decision.outcome)),
        " ".join(filter(None, [decision.detail, *sentences])),
    )
