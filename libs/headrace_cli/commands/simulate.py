"""`headrace simulate`: replays a trace in virtual time over the router's and the planner's own code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

from rich.console import Console

from headrace_cli.output import (
    Column,
    Json,
    answer_console,
    command,
    fitted_table,
    option,
    print_json,
)
from headrace_common.errors import ConfigError, DeadlineExceeded, InternalError
from headrace_common.extras import require_extra
from headrace_planner.observation import PlannedRole
from headrace_planner.settings import read_profile, read_settings
from headrace_simulator.settings import (
    POOL_WAYS,
    Scaling,
    ScalingSettings,
    SimulationSettings,
    SimulationSpec,
    Way,
)

_TIME_LIMIT_S: Final = 4 * 3_600.0
_MISCONFIGURED: Final = 2
_COLUMNS: Final = (
    Column("Placement"),
    Column("TTFT p50", right=True),
    Column("p99", rank=2, right=True),
    Column("ITL p50", right=True),
    Column("p99", rank=3, right=True),
    Column("E2E p99", rank=4, right=True),
    Column("Reached goals", right=True),
    Column("Goodput/s", right=True),
    Column("Cached", rank=1, right=True),
    Column("Worker-hours", right=True),
    Column("Changes", rank=5, right=True),
)

_CLASS_COLUMNS: Final = (
    Column("Placement"),
    Column("Class"),
    Column("Requests", rank=1, right=True),
    Column("TTFT p50", right=True),
    Column("p99", right=True),
    Column("ITL p50", rank=2, right=True),
    Column("Reached goals", right=True),
    Column("Goodput/s", right=True),
)


_Goal = Annotated[
    float | None, option("In seconds. Default: the planner's goal.", min=1e-3, max=1e5)
]


@command(
    "simulate",
    "headrace simulate --trace conversation.jsonl --profile profile.json --prefill 4 --decode 8",
)
def simulate(  # noqa: PLR0913, PLR0917 - typer makes an option of each
    trace: Annotated[
        Path,
        option(
            "Trace in the form of Mooncake's, as JSON lines.",
            metavar="FILE",
            exists=True,
            dir_okay=False,
        ),
    ],
    profile: Annotated[Path, option("JSON file with a worker's profile.", metavar="FILE")],
    prefill: Annotated[
        int, option("Prefill workers, at first with --planner.", min=0, max=2_000)
    ] = 1,
    decode: Annotated[
        int, option("Decode workers, at first with --planner.", min=1, max=2_000)
    ] = 1,
    workers: Annotated[
        int,
        option("Workers of both roles, at first with --planner, and no others.", min=0, max=2_000),
    ] = 0,
    planner: Annotated[
        bool, option("Let the planner change the numbers of workers.", "--planner")
    ] = False,
    settings: Annotated[
        Path | None, option("TOML file with the planner's settings.", metavar="FILE")
    ] = None,
    way: Annotated[
        list[Way] | None,
        option(
            "Placement to replay; may be repeated. Default: all, with --workers also plain engines.",
            "--placement",
            case_sensitive=False,
        ),
    ] = None,
    host_tokens: Annotated[
        int,
        option("Tokens in a worker's main memory, with tiers; 0 is 4 x KV memory.", min=0),
    ] = 0,
    ttft: _Goal = None,
    itl: _Goal = None,
    interval: Annotated[float, option("Of decisions, in s.", min=1, max=1e5)] = 30.0,
    worker_start: Annotated[float, option("Seconds of a start.", min=0, max=1e5)] = 30.0,
    seconds: Annotated[float | None, option("Replay so many.", min=1, max=1e9)] = None,
    seed: Annotated[int, option("Of draws between equal workers.", min=0)] = 0,
    as_json: Json = False,
) -> None:
    """Replays a trace in virtual time, and shows the latencies that a deployment would have."""
    require_extra("headrace simulate", "router")
    worker = read_profile(profile)
    if worker is None:
        raise ConfigError("give --profile FILE, which `headrace profile` writes")
    plan = read_settings(settings)
    if Way.PLAIN in (way or ()) and not workers:
        raise ConfigError(f"--placement '{Way.PLAIN}' has workers of both roles: give --workers")
    runs = tuple(
        SimulationSettings(
            prefill_workers=prefill,
            decode_workers=decode,
            both_workers=workers,
            way=one,
            host_tokens=host_tokens or 4 * worker.kv_tokens,
            ttft_s=ttft if ttft is not None else plan.goals.ttft_s,
            itl_s=itl if itl is not None else plan.goals.itl_s,
            seed=seed,
            scaling=ScalingSettings(
                scaling=Scaling.PLANNER if planner else Scaling.FIXED,
                planner=plan,
                interval_s=interval,
                worker_start_s=worker_start,
            ),
        )
        for one in way or (Way if workers else POOL_WAYS)
    )
    spec = SimulationSpec(trace=str(trace), seconds_max=seconds, profile=worker, runs=runs)
    results = run_spec(spec)
    if as_json:
        print_json({"trace": str(trace), "runs": results})
    else:
        goals = runs[0]
        answer_console().print(
            f"Goals: TTFT {goals.ttft_s:g} s and ITL {goals.itl_s:g} s at most (--ttft, --itl)."
        )
        _show(results)


def run_spec(spec: SimulationSpec) -> list[dict[str, Any]]:
    """The results of all runs. Raises as run_module does."""
    results: list[dict[str, Any]] = run_module(
        "headrace_simulator", given=spec.model_dump_json(), limit_s=_TIME_LIMIT_S
    )
    return results


def run_module(module: str, *arguments: str, limit_s: float, given: str = "") -> Any:
    """The JSON that a module prints, which runs in a process of its own.

    Raises ConfigError, DeadlineExceeded or InternalError.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            input=given,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
            # Sets of workers have one order in every process, so equal runs have equal results.
            env={**os.environ, "PYTHONHASHSEED": "0"},
        )
    except subprocess.TimeoutExpired:
        raise DeadlineExceeded(f"{module} took more than {limit_s:g} s: replay less") from None
    if done.returncode == _MISCONFIGURED:
        raise ConfigError(done.stderr.strip())
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no output"]
        raise InternalError(f"{module} ended with status {done.returncode}: {last[0]}")
    return json.loads(done.stdout)


def _show(runs: Sequence[Mapping[str, Any]]) -> None:
    console = answer_console()
    rows = [
        (
            run["way"],
            time_text(run["ttft"], "p50"),
            time_text(run["ttft"], "p99"),
            time_text(run["itl"], "p50"),
            time_text(run["itl"], "p99"),
            time_text(run["e2e"], "p99"),
            f"{run['attainment']:.1%}",
            f"{run['goodput']:.3g}",
            f"{run['cached_share']:.1%}",
            f"{sum(run[f'{role}_worker_hours'] for role in PlannedRole):.2f}",
            str(len(run["changes"])),
        )
        for run in runs
    ]
    console.print(fitted_table(console, _COLUMNS, rows)[0])
    _show_classes(console, runs)
    first = runs[0]
    console.print(
        f"{first['requests']} requests in {first['duration_s']:.0f} s of the trace's time, "
        f"{sum(first['failures'].values())} failed."
    )


def _show_classes(console: Console, runs: Sequence[Mapping[str, Any]]) -> None:
    """A row for each class of each placement, where the trace has several classes."""
    rows = [
        (
            run["way"],
            one["priority"],
            str(one["requests"]),
            time_text(one["ttft"], "p50"),
            time_text(one["ttft"], "p99"),
            time_text(one["itl"], "p50"),
            f"{one['attainment']:.1%}",
            f"{one['goodput']:.3g}",
        )
        for run in runs
        for one in run["classes"]
    ]
    if rows:
        console.print(fitted_table(console, _CLASS_COLUMNS, rows)[0])


def time_text(times: Mapping[str, Any], percentile: str) -> str:
    seconds = times["percentiles"][percentile]
    return f"{1e3 * seconds:.0f} ms" if seconds < 10 else f"{seconds:.1f} s"
