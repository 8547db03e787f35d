"""Replays an hour of conversations with each placement, in virtual time.

    python -m bench.simulation.placements [--trace FILE] [--profile FILE] [--prefill 6] [--decode 4] [--output FOLDER]

The default trace is that of `python -m bench.simulation.make_trace conversation --seed 1`. Every placement is replayed
twice, and the results must be equal. "Took" is the real time of one replay.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Final

from headrace_planner.files import read_profile
from headrace_simulator.replay import simulate
from headrace_simulator.result import SimulationResult
from headrace_simulator.settings import SimulationSettings, Way
from headrace_simulator.trace import TraceRequest, read_trace

FOLDER: Final = Path("bench/simulation")
_HEAD: Final = (
    *("placement", "TTFT p50, p90, p99 s", "ITL p50, p99 ms", "E2E p99 s", "reached both goals"),
    *("goodput/s", "cached prompt tokens", "worker-hours", "took s"),
)


def replayed(
    settings: SimulationSettings, profile: Path, trace: list[TraceRequest]
) -> tuple[SimulationResult, float]:
    """The result, and the real time of one replay. Fails when a second replay has another result."""
    worker = read_profile(profile)
    assert worker is not None
    start_s = time.perf_counter()
    result = simulate(settings, worker, trace)
    took_s = time.perf_counter() - start_s
    if simulate(settings, worker, trace) != result:
        raise SystemExit(f"{settings.way}: two replays differ")
    return result, took_s


def row(result: SimulationResult, took_s: float) -> str:
    """The line of a placement."""
    ttft, itl, e2e = (one.percentiles for one in (result.ttft, result.itl, result.e2e))
    cells = (
        result.way,
        f"{ttft['p50']:.2f}, {ttft['p90']:.2f}, {ttft['p99']:.2f}",
        f"{itl['p50'] * 1e3:.1f}, {itl['p99'] * 1e3:.1f}",
        f"{e2e['p99']:.1f}",
        f"{result.attainment:.1%}",
        f"{result.goodput:.3f}",
        f"{result.cached_share:.1%}",
        f"{result.worker_hours:.2f}",
        f"{took_s:.1f}",
    )
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, default=FOLDER / "conversation.jsonl")
    parser.add_argument("--profile", type=Path, default=FOLDER / "example-profile.json")
    parser.add_argument("--prefill", type=int, default=4)
    parser.add_argument("--decode", type=int, default=4)
    parser.add_argument("--ttft", type=float, default=5.0)
    parser.add_argument("--itl", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="folder for the table")
    options = parser.parse_args()
    with options.trace.open(encoding="utf-8") as lines:
        trace = read_trace(lines)
    text = [
        "# Placement in a simulated hour",
        "",
        "`python -m bench.simulation.placements`: what it does is in its docstring.",
        "",
        (
            f"{len(trace)} requests of `{options.trace}` on {options.prefill} prefill and {options.decode} decode "
            f"workers with the profile `{options.profile.name}`. Goals: {options.ttft:g} s to the first token, "
            f"{options.itl * 1e3:g} ms between tokens."
        ),
        "",
        "| " + " | ".join(_HEAD) + " |",
        "|---" * len(_HEAD) + "|",
    ]
    for way in Way:
        worker = read_profile(options.profile)
        assert worker is not None
        settings = SimulationSettings(
            prefill_workers=options.prefill,
            decode_workers=options.decode,
            way=way,
            host_tokens=4 * worker.kv_tokens,
            ttft_s=options.ttft,
            itl_s=options.itl,
            seed=options.seed,
        )
        text.append(row(*replayed(settings, options.profile, trace)))
        print(text[-1], flush=True)
    page = "\n".join([*text, ""])
    if options.output:
        (options.output / "simulation.md").write_text(page)


if __name__ == "__main__":
    main()
