"""Replays a day: two pools with the planner, workers of both roles with the planner, fixed splits of the budget, and an
oracle that knows the next steps.

    python -m bench.simulation.day --keep day.json --runs planner fluid oracle
    python -m bench.simulation.day --keep day.json --runs --output bench/results

The day is that of `python -m bench.simulation.make_trace day`. It has a ramp in the morning, a burst, and a change from
long prompts to long answers.
All runs replay the same requests in the simulator, with the profile of one worker. A request
reaches its goals when both its time to first token and its mean time between tokens are within the goals. Fixed workers
run all day. `fluid` has workers of both roles. After a name, "@" gives the planner's setting `share`: that of the
requests that should reach a goal.
--keep adds the runs to those of earlier calls in FILE; a run with the same name replaces the earlier one.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.simulation.make_trace import DAY_S, day_entries
from bench.simulation.oracle import OracleDecisions
from headrace_planner.observation import WorkerCounts
from headrace_planner.settings import (
    BudgetSettings,
    GoalSettings,
    PlannerSettings,
    WorkerProfile,
    read_profile,
)
from headrace_simulator.replay import simulate
from headrace_simulator.settings import Scaling, ScalingSettings, SimulationSettings, Way
from headrace_simulator.trace import TraceRequest, read_trace

PROFILE = Path("bench/simulation/example-profile.json")
BUDGET = 6
TTFT_S, ITL_S = 5.0, 0.1
INTERVAL_S, WORKER_START_S = 30.0, 60.0
HOUR_S = 3_600.0
# The targets of this comparison.
POINTS_MIN, HOURS_MAX, ORACLE_MIN, FLUID_MIN = 0.05, 0.8, 0.9, 0.981
DEFAULT_SHARE = GoalSettings().share


def day_settings(scaling: Scaling, workers: WorkerCounts, share: float) -> SimulationSettings:
    """One run of the day. Without a fixed split, the planner's minimums are the first workers."""
    planner = PlannerSettings(
        goals=GoalSettings(ttft_s=TTFT_S, itl_s=ITL_S, share=share),
        budget=BudgetSettings(devices_max=BUDGET),
    )
    return SimulationSettings(
        prefill_workers=workers.prefill,
        decode_workers=max(1, workers.decode),
        both_workers=workers.both,
        way=Way.LOAD_ONLY,
        ttft_s=TTFT_S,
        itl_s=ITL_S,
        scaling=ScalingSettings(
            scaling=scaling,
            planner=planner,
            interval_s=INTERVAL_S,
            worker_start_s=WORKER_START_S,
        ),
    )


def run(name: str, profile: WorkerProfile, trace: Sequence[TraceRequest]) -> dict[str, Any]:
    """One run: "planner", "fluid@0.99", "oracle", or a split such as "4:2" or "6"."""
    decide = None
    kind, _, text = name.partition("@")
    share = float(text or DEFAULT_SHARE)
    if kind == "planner":
        settings = day_settings(Scaling.PLANNER, WorkerCounts(1, 1), share)
    elif kind == "fluid":
        settings = day_settings(Scaling.PLANNER, WorkerCounts(0, 0, 1), share)
    elif kind == "oracle":
        settings = day_settings(Scaling.FIXED, WorkerCounts(1, 1), share)
        decide = OracleDecisions(settings.scaling, profile, trace)
    elif kind.isdigit():
        settings = day_settings(Scaling.FIXED, WorkerCounts(0, 0, int(kind)), share)
    else:
        settings = day_settings(Scaling.FIXED, WorkerCounts(*map(int, kind.split(":"))), share)
    start_s = time.perf_counter()
    result = simulate(settings, profile, trace, decide)
    took_s = time.perf_counter() - start_s
    print(
        f"{name}: {result.attainment:.1%} reached the goals (TTFT {result.ttft_attainment:.1%}, ITL "
        f"{result.itl_attainment:.1%}), {result.worker_hours:.1f} worker-hours, {len(result.changes)} changes, "
        f"{took_s:.0f} s",
        flush=True,
    )
    return {**asdict(result), "worker_hours": result.worker_hours, "took_s": took_s}


def most_changes_per_hour(changes: Sequence[Mapping[str, Any]]) -> int:
    """The most changes within any hour of the clock."""
    hours = [int(change["time_s"] // HOUR_S) for change in changes]
    return max((hours.count(hour) for hour in set(hours)), default=0)


def reversals(changes: Sequence[Mapping[str, Any]], within_s: float) -> int:
    """How often a role grew and shrank again, or the reverse, within this time."""
    count = 0
    for role in ("prefill_workers", "decode_workers", "both_workers"):
        last: tuple[float, int] | None = None
        known = 1
        for change in changes:
            step = change[role] - known
            known = change[role]
            if not step:
                continue
            direction = 1 if step > 0 else -1
            if last is not None and last[1] != direction and change["time_s"] - last[0] < within_s:
                count += 1
            last = change["time_s"], direction
    return count


def render(runs: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown: a row for each run, and the comparison with the targets."""
    fixed = {name: one for name, one in runs.items() if ":" in name}
    best = max(fixed, key=lambda name: float(fixed[name]["attainment"]))
    lines = [
        "# A day with the planner",
        "",
        "`python -m bench.simulation.day`: what it does is in its docstring.",
        "",
        (
            f"{runs[best]['requests']} requests in {DAY_S / HOUR_S:.0f} h. Goals: {TTFT_S:g} s to the first token and "
            f"{ITL_S * 1e3:g} ms between tokens, for each request. Budget: {BUDGET} workers. A decision every "
            f"{INTERVAL_S:g} s; a new worker needs {WORKER_START_S:g} s."
        ),
        "",
        "| workers | both goals | TTFT goal | ITL goal | TTFT p50, p99 s | worker-hours | changes | most in an hour |",
        "|---|---|---|---|---|---|---|---|",
    ]
    order = sorted(fixed, key=lambda name: int(name.split(":")[0]))
    for name in (*(one for one in sorted(runs, reverse=True) if one not in fixed), *order):
        one = runs[name]
        ttft = one["ttft"]["percentiles"]
        label = (
            f"{name} P:D" + (", best" if name == best else "") if name in fixed else _label(name)
        )
        lines.append(
            f"| {label} | {one['attainment']:.1%} | {one['ttft_attainment']:.1%} | {one['itl_attainment']:.1%} "
            f"| {ttft['p50']:.2f}, {ttft['p99']:.1f} | {one['worker_hours']:.1f} | {len(one['changes'])} "
            f"| {most_changes_per_hour(one['changes'])} |"
        )
    if "planner" in runs and "oracle" in runs:
        lines += ["", *_verdicts(runs, best)]
    return "\n".join([*lines, ""])


def _label(name: str) -> str:
    kind, _, share = name.partition("@")
    text = {
        "planner": "two pools, planner",
        "fluid": "both roles, planner",
        "oracle": "two pools, oracle",
    }
    label = text.get(kind, f"{kind} of both roles")
    return f"{label}, share {share}" if share else label


def _verdicts(runs: Mapping[str, Mapping[str, Any]], best: str) -> list[str]:
    planner, oracle, fixed = runs["planner"], runs["oracle"], runs[best]
    points = planner["attainment"] - fixed["attainment"]
    hours = planner["worker_hours"] / fixed["worker_hours"]
    share = planner["attainment"] / oracle["attainment"]
    back = reversals(planner["changes"], 10 * INTERVAL_S)

    def met(reached: bool) -> str:
        return "reached" if reached else "MISSED"

    return [
        "| target | measured | |",
        "|---|---|---|",
        (
            f"| at least {POINTS_MIN * 100:g} points more than the best fixed split | {points * 100:+.1f} points "
            f"| {met(points >= POINTS_MIN)} |"
        ),
        f"| at most {HOURS_MAX:g} of its worker-hours | {hours:.2f} | {met(hours <= HOURS_MAX)} |",
        f"| at least {ORACLE_MIN:g} of the oracle's attainment | {share:.3f} | {met(share >= ORACLE_MIN)} |",
        *_fluid_verdict(runs, met),
        "",
        f"The planner of two pools reversed a change of a role within {10 * INTERVAL_S:g} s {back} times.",
    ]


def _fluid_verdict(
    runs: Mapping[str, Mapping[str, Any]], met: Callable[[bool], str]
) -> Iterator[str]:
    """Of the best run with workers of both roles, as far as its worker-hours are at most those of two pools."""
    hours = runs["planner"]["worker_hours"]
    fluid = [
        one
        for name, one in runs.items()
        if name.startswith("fluid") and one["worker_hours"] <= hours
    ]
    if fluid:
        best = max(fluid, key=lambda one: float(one["attainment"]))
        enough = best["attainment"] >= max(FLUID_MIN, runs["planner"]["attainment"])
        yield (
            f"| workers of both roles: at least {FLUID_MIN:.1%} and two pools, with at most their worker-hours "
            f"| {best['attainment']:.1%} with {best['worker_hours']:.1f} h | {met(enough)} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--runs",
        nargs="*",
        default=[],
        help="planner, fluid, oracle or fixed; planner@0.99, fluid@0.99",
    )
    parser.add_argument(
        "--splits",
        nargs="*",
        help="of fixed workers, such as 4:2, or 6 of both roles; default: all",
    )
    parser.add_argument("--profile", type=Path, default=PROFILE)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the rates")
    parser.add_argument("--hours", type=float, default=24.0, help="from the start of the day")
    parser.add_argument("--keep", type=Path, help="JSON of all runs so far")
    parser.add_argument("--output", type=Path, help="folder for the table")
    options = parser.parse_args()
    profile = read_profile(options.profile)
    assert profile is not None
    splits = options.splits or [
        *(f"{one}:{BUDGET - one}" for one in range(1, BUDGET)),
        str(BUDGET),
    ]
    names = [one for one in options.runs if one != "fixed"]
    names += splits if "fixed" in options.runs else []
    entries = map(json.dumps, day_entries(options.seed, options.scale))
    trace = read_trace(entries, seconds_max=options.hours * HOUR_S)
    runs: dict[str, Any] = {}
    if options.keep and options.keep.exists():
        runs = json.loads(options.keep.read_text())
    for name in names:
        runs[name] = run(name, profile, trace)
        if options.keep:
            options.keep.write_text(json.dumps(runs))
    if any(":" in name for name in runs):
        text = render(runs)
        print(text)
        if options.output:
            (options.output / "day.md").write_text(text)


if __name__ == "__main__":
    main()
