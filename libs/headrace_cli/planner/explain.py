"""`headrace planner explain`: the last decisions of a running planner, with their reasons."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Final

import typer

from headrace.planner.v1 import planner_pb2, planner_pb2_grpc
from headrace_cli.addressed import check_address
from headrace_cli.client import CALL_TIMEOUT_S, rpc_errors, started_channel
from headrace_cli.console import answer_console
from headrace_cli.exit_status import run_command
from headrace_cli.json_output import Json, print_record
from headrace_cli.options import DEFAULT_ROUTER, Router
from headrace_cli.planner.reasons import reason_records
from headrace_cli.records import ExplainedDecision, ExplainRecord
from headrace_cli.starting import WAIT_S, Wait
from headrace_cli.tables import Column, fitted_table
from headrace_cli.up.state import find_planner
from headrace_common.durations import seconds_from_duration, unix_s_from_timestamp

PLANNER_VARIABLE: Final = "HEADRACE_PLANNER"
_DECISIONS_MAX: Final = 1_000
_COLUMNS: Final = (
    Column("Number", rank=2, right=True),
    Column("Time", rank=1),
    Column("Workers", right=True),
    Column("Target", right=True),
    Column("Outcome"),
    Column("Why"),
)


def explain(
    planner: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            envvar=PLANNER_VARIABLE,
            help="Planner to call; empty means that of `headrace up`.",
        ),
    ] = "",
    router: Router = DEFAULT_ROUTER,
    count: Annotated[
        int, typer.Option(min=1, max=_DECISIONS_MAX, help="Decisions to show, the newest first.")
    ] = 20,
    changes: Annotated[
        bool, typer.Option("--changes", help="Of these, show only those that ask for a change.")
    ] = False,
    wait: Wait = WAIT_S,
    as_json: Json = False,
) -> None:
    """Shows what a running planner has decided, and why."""

    async def work() -> None:
        address = check_address("--planner", planner) if planner else find_planner(router)
        record = await read_explanation(address, count)
        if as_json:
            print_record(record)
        else:
            _show(record, [one for one in record.decisions if not changes or _is_change(one)])

    run_command(work())


async def read_explanation(planner: str, count: int) -> ExplainRecord:
    """The planner's state and its last decisions. Raises HeadraceError when it cannot be reached."""
    async with started_channel(planner) as channel:
        stub = planner_pb2_grpc.PlannerServiceStub(channel)
        with rpc_errors(f"the planner on {planner}"):
            status = await stub.GetStatus(planner_pb2.GetStatusRequest(), timeout=CALL_TIMEOUT_S)
            listed = await stub.ListDecisions(
                planner_pb2.ListDecisionsRequest(page_size=count), timeout=CALL_TIMEOUT_S
            )
    current, target = status.current, status.target.workers
    observed, targeted = status.HasField("current"), status.HasField("target")
    return ExplainRecord(
        model=status.model,
        mode=_short(planner_pb2.GetStatusResponse.Mode.Name(status.mode)),
        interval_s=seconds_from_duration(status.interval),
        observation_fault=status.observation_fault,
        prefill_workers=current.prefill if observed else None,
        decode_workers=current.decode if observed else None,
        prefill_target=target.prefill if targeted else None,
        decode_target=target.decode if targeted else None,
        decisions=list(map(_decision, listed.decisions)),
    )


def _decision(decision: planner_pb2.Decision) -> ExplainedDecision:
    return ExplainedDecision(
        number=decision.number,
        start_unix_s=unix_s_from_timestamp(decision.start_time),
        duration_s=seconds_from_duration(decision.duration),
        prefill_workers=decision.current.prefill,
        decode_workers=decision.current.decode,
        prefill_target=decision.target.prefill,
        decode_target=decision.target.decode,
        outcome=_short(planner_pb2.Decision.Outcome.Name(decision.outcome)),
        detail=decision.detail,
        reasons=reason_records(decision.reasons),
    )


def _short(name: str) -> str:
    """The end of an enum value's name, such as "advise" of MODE_ADVISE."""
    return name.partition("_")[2].lower()


def _show(record: ExplainRecord, decisions: Sequence[ExplainedDecision]) -> None:
    console = answer_console()
    line = f"{record.model}, mode {record.mode}, a decision every {record.interval_s:g} s"
    if record.prefill_workers is not None:
        line += f": {record.prefill_workers} P, {record.decode_workers} D now"
    if record.prefill_target is not None:
        line += f", target {record.prefill_target} P, {record.decode_target} D"
    console.print(line, markup=False, highlight=False)
    if record.observation_fault:
        console.print(f"not observed: {record.observation_fault}", style="red", markup=False)
    table, _ = fitted_table(console, _COLUMNS, list(map(_cells, decisions)))
    console.print(table)


def _cells(decision: ExplainedDecision) -> tuple[str, ...]:
    target = f"{decision.prefill_target} P, {decision.decode_target} D"
    sentences = [reason.sentence for reason in decision.reasons]
    return (
        str(decision.number),
        datetime.fromtimestamp(decision.start_unix_s, UTC).isoformat(timespec="seconds"),
        f"{decision.prefill_workers} P, {decision.decode_workers} D",
        target if _is_change(decision) else "",
        decision.outcome,
        " ".join(filter(None, [decision.detail, *sentences])),
    )


def _is_change(decision: ExplainedDecision) -> bool:
    return (decision.prefill_target, decision.decode_target) != (
        decision.prefill_workers,
        decision.decode_workers,
    )
