"""`headrace planner`: what the planner would decide for a recording, and what a running one has decided."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace_cli.console import answer_console
from headrace_cli.exit_status import failures_as_exit
from headrace_cli.json_output import Json, print_json
from headrace_cli.planner.explain import explain
from headrace_cli.tables import Column, fitted_table
from headrace_planner.files import read_profile, read_settings
from headrace_planner.observation import Decision, Interval, WorkerCounts
from headrace_planner.planner import PlannerState, plan
from headrace_planner.profile import WorkerProfile
from headrace_planner.recording import read_intervals
from headrace_planner.settings import PlannerSettings

_COLUMNS = (
    Column("Time"),
    Column("Workers", right=True),
    Column("Target", right=True),
    Column("Why"),
)


def register(app: typer.Typer) -> None:
    """Adds `headrace planner replay` and `headrace planner explain`."""
    planner_app = typer.Typer(
        no_args_is_help=True, help="Plans the numbers of prefill and decode workers."
    )
    planner_app.command(
        "replay",
        epilog="Example:  headrace planner replay monday.jsonl --settings planner.toml --profile profile.json",
    )(replay)
    planner_app.command(
        "explain",
        epilog="Examples:  headrace planner explain   |   headrace planner explain --planner 10.0.0.5:7058 --changes",
    )(explain)
    app.add_typer(planner_app, name="planner")


def replay(
    recording: Annotated[
        Path, typer.Argument(help="Observations as JSON lines, one interval a line.")
    ],
    settings: Annotated[
        Path | None, typer.Option(help="TOML file with the planner's settings.")
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(help="JSON file with a worker's profile. Without it, only the load decides."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Shows what the planner would decide for each interval of a recording. It changes nothing."""
    with failures_as_exit():
        chosen = read_settings(settings)
        measured = read_profile(profile)
        with recording.open(encoding="utf-8") as lines:
            decisions = _decisions(chosen, measured, read_intervals(lines))
            if as_json:
                for interval, decision in decisions:
                    print_json(decision_object(interval, decision), one_line=True)
            else:
                _show(list(decisions))


def _decisions(
    settings: PlannerSettings, profile: WorkerProfile | None, intervals: Iterator[Interval]
) -> Iterator[tuple[Interval, Decision]]:
    state = PlannerState()
    for interval in intervals:
        decision, state = plan(settings, profile, interval, state)
        yield interval, decision


def decision_object(interval: Interval, decision: Decision) -> dict[str, Any]:
    """The decision for programs."""
    return {
        "start_unix_s": interval.start_unix_s,
        "duration_s": interval.duration_s,
        "is_changing": interval.is_changing,
        **asdict(decision),
    }


def _show(decisions: list[tuple[Interval, Decision]]) -> None:
    console = answer_console()
    rows = [
        (
            datetime.fromtimestamp(interval.start_unix_s, UTC).isoformat(timespec="seconds"),
            _counts_text(decision.current),
            _counts_text(decision.target) if decision.is_change else "",
            _why(interval, decision),
        )
        for interval, decision in decisions
    ]
    table, _ = fitted_table(console, _COLUMNS, rows)
    console.print(table)
    changes = sum(decision.is_change for _, decision in decisions)
    console.print(f"{changes} changes in {len(decisions)} intervals.")


def _counts_text(counts: WorkerCounts) -> str:
    return f"{counts.prefill} P, {counts.decode} D"


def _why(interval: Interval, decision: Decision) -> str:
    if interval.is_changing:
        return "Workers join or leave."
    return " ".join(reason.sentence for reason in decision.reasons)
