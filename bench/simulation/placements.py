"""Replays an hour of conversations with each placement, in virtual time.

    python -m bench.simulation.placements [--trace FILE] [--profile FILE] [--prefill 6] [--decode 4] [--output FOLDER]
    python -m bench.simulation.placements --published conversation_trace.jsonl

The default trace is that of `python -m bench.simulation.make_trace conversation --seed 1`. Every placement is replayed
twice, and the results must be equal. "CPU" is that of one replay. `--published` adds a second table: a trace
that Mooncake published, with a profile for its long prompts. docs/simulator.md says where it is.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from headrace_planner.settings import WorkerProfile, read_profile
from headrace_simulator.job import SimulationResult
from headrace_simulator.replay import simulate
from headrace_simulator.settings import POOL_WAYS, SimulationSettings
from headrace_simulator.trace import TraceRequest, read_trace

FOLDER: Final = Path("bench/simulation")
LARGE_PROFILE: Final = FOLDER / "example-large-profile.json"
_SOURCE: Final = (
    'Source: R. Qin et al., "Mooncake: Trading More Storage for Less Computation", FAST 2025. Its traces are in the '
    "folder `FAST25-release/traces` of <https://github.com/kvcache-ai/Mooncake>. They have times, lengths and numbers "
    "of blocks, and no text."
)
_HASH_SEED: Final = "PYTHONHASHSEED"
_HEAD: Final = (
    *("placement", "TTFT p50, p90, p99 s", "ITL p50, p99 ms", "E2E p99 s", "reached both goals"),
    *("goodput/s", "cached prompt tokens", "worker-hours", "CPU s"),
)


@dataclass(frozen=True, slots=True)
class Replay:
    """A trace and a deployment. `source` names the trace in the report."""

    trace: Path
    source: str
    profile: Path
    prefill: int
    decode: int
    ttft_s: float
    itl_s: float
    seed: int
    seconds: float = math.inf


def replayed(
    settings: SimulationSettings, worker: WorkerProfile, trace: list[TraceRequest]
) -> tuple[SimulationResult, float]:
    """The result, and the CPU of one replay in seconds. Fails when a second replay has another result."""
    start_s = time.process_time()
    result = simulate(settings, worker, trace)
    cpu_s = time.process_time() - start_s
    if simulate(settings, worker, trace) != result:
        raise SystemExit(f"{settings.way}: two replays differ")
    return result, cpu_s


def row(result: SimulationResult, cpu_s: float) -> str:
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
        f"{cpu_s:.1f}",
    )
    return "| " + " | ".join(cells) + " |"


def table(options: Replay) -> list[str]:
    """A paragraph on what is replayed, and the table with a row for each placement."""
    worker = read_profile(options.profile)
    assert worker is not None
    with options.trace.open(encoding="utf-8") as lines:
        trace = read_trace(lines, seconds_max=options.seconds)
    text = [
        (
            f"{len(trace)} requests of {options.source} on {options.prefill} prefill and {options.decode} decode "
            f"workers with the profile `{options.profile.name}`. Goals: {options.ttft_s:g} s to the first token, "
            f"{options.itl_s * 1e3:g} ms between tokens."
        ),
        "",
        "| " + " | ".join(_HEAD) + " |",
        "|---" * len(_HEAD) + "|",
    ]
    print("\n".join(text), flush=True)
    for way in POOL_WAYS:
        settings = SimulationSettings(
            prefill_workers=options.prefill,
            decode_workers=options.decode,
            way=way,
            host_tokens=4 * worker.kv_tokens,
            ttft_s=options.ttft_s,
            itl_s=options.itl_s,
            seed=options.seed,
        )
        text.append(row(*replayed(settings, worker, trace)))
        print(text[-1], flush=True)
    return text


def main() -> None:
    if os.environ.get(_HASH_SEED) != "0":
        # Sets of workers have one order in every process then, as in `headrace simulate`.
        arguments = [sys.executable, "-m", "bench.simulation.placements", *sys.argv[1:]]
        os.execve(sys.executable, arguments, {**os.environ, _HASH_SEED: "0"})
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, default=FOLDER / "conversation.jsonl")
    parser.add_argument(
        "--profile", type=Path, default=FOLDER / "example-conversation-profile.json"
    )
    parser.add_argument("--prefill", type=int, default=4)
    parser.add_argument("--decode", type=int, default=4)
    parser.add_argument("--ttft", type=float, default=5.0)
    parser.add_argument("--itl", type=float, default=0.1)
    parser.add_argument("--published", type=Path, help="a trace that Mooncake published")
    parser.add_argument("--published-prefill", type=int, default=6)
    parser.add_argument("--published-decode", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=math.inf, help="of the published trace")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="folder for the tables")
    options = parser.parse_args()
    text = [
        "# Placement in a simulated hour",
        "",
        "`python -m bench.simulation.placements`: what it does is in its docstring.",
        "",
        *table(
            Replay(
                *(options.trace, f"`{options.trace}`", options.profile),
                *(options.prefill, options.decode, options.ttft, options.itl, options.seed),
            )
        ),
    ]
    if options.published:
        text += [
            "",
            "## A published trace",
            "",
            *table(
                Replay(
                    *(options.published, f"Mooncake's `{options.published.name}`", LARGE_PROFILE),
                    *(options.published_prefill, options.published_decode),
                    *(options.ttft, options.itl, options.seed, options.seconds),
                )
            ),
            "",
            f"Replayed on {datetime.now(UTC):%-d %B %Y}. {_SOURCE}",
        ]
    if options.output:
        (options.output / "simulation.md").write_text("\n".join([*text, ""]))


if __name__ == "__main__":
    main()
