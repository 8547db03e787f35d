"""Simulates the requests of `bench.goodput` with workers at its pace, and prints the shares of good requests.

    python -m bench.simulation.paced [--ways pools-3-1,both] [--rates 2.75,3.5] [--seeds 1-10] [--seconds 60]

`both` is replayed for each pair of bounds, which its requests carry. A late one is refused, as by a router. `plain` has
vLLM engines. Shares are means over the seeds, with half of their 95 % interval.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Final

from bench.goodput.__main__ import alone_of
from bench.goodput.load import LOADS, arrivals
from bench.goodput.report import FACTORS, Factors, Objective
from bench.gpu_pace.accelerators import ACCELERATORS, Pace
from headrace_common.time_model.model import HandoverTimes, StepTimes
from headrace_planner.settings import WorkerProfile
from headrace_simulator.job import RequestOutcome
from headrace_simulator.replay import simulate
from headrace_simulator.settings import SimulationSettings, Way
from headrace_simulator.trace import TraceRequest

_STEP_TOKENS: Final = 2_048
_STRETCH: Final = 1.014
_BETWEEN_STEPS_S: Final = 3e-3
"""How much longer steps of paced engines are than modelled, and what vLLM takes between two of them.

The first is measured by the benchmark, and the second shows in the tokens of decode workers at 2 requests/s.
"""
_HASH_SEED: Final = "PYTHONHASHSEED"


def profile_of(pace: Pace) -> WorkerProfile:
    """Workers of the pace, as `bench.goodput` starts them."""
    pace = pace.slower(_STRETCH)
    token_s = 1e-6 * pace.token_us
    return WorkerProfile(
        steps=StepTimes(
            fixed_s=1e-3 * pace.step_ms + _BETWEEN_STEPS_S,
            s_per_prompt_token=token_s,
            s_per_attended_token=token_s / pace.curve_tokens,
            s_per_context_token=1e-6 * pace.read_us,
            prompt_steps=100,
            answer_steps=100,
        ),
        handovers=HandoverTimes(fixed_s=0.02, count=100),
        kv_tokens=400_000,
        kv_bytes_per_token=2_048,
        max_num_seqs=64,
        max_num_batched_tokens=_STEP_TOKENS,
    )


def replayed(
    options: argparse.Namespace, way: str, rate: float, factors: Factors | None, seed: int
) -> list[RequestOutcome]:
    """The outcomes of one block. Without factors, requests have no bounds."""
    pace = ACCELERATORS[options.accelerator].slower(options.slowness)
    arriving = arrivals(options.load, rate, options.seconds, seed)
    trace = [
        TraceRequest(number, one.due_s, one.prompt_tokens, one.answer_tokens)
        for number, one in enumerate(arriving)
    ]
    kind, prefill, decode = way.split("-") if way.startswith("pools") else (way, "1", "1")
    objective = alone_of(pace, _STEP_TOKENS).times(factors or FACTORS[0])
    settings = SimulationSettings(
        prefill_workers=int(prefill),
        decode_workers=int(decode),
        both_workers=0 if kind == "pools" else 4,
        way=Way.PLAIN if kind == "plain" else Way.KV_AWARE,
        ttft_s=1e-3 * objective.ttft_ms,
        itl_s=1e-3 * objective.tpot_ms,
        bounded=factors is not None,
        early_refusal=options.refuse and factors is not None,
    )
    outcomes: list[RequestOutcome] = []
    simulate(settings, profile_of(pace), trace, on_ended=outcomes.append)
    # As in the benchmark, what has not ended by then has failed.
    end_s = (
        outcomes[0].arrival_s - outcomes[0].request.arrival_s + trace[-1].arrival_s + options.drain
    )
    return [one if one.end_s <= end_s else replace(one, failure="too late") for one in outcomes]


def share(outcomes: Sequence[RequestOutcome], bound: Objective) -> float:
    """That of the good ones."""
    met = [one.meets(1e-3 * bound.ttft_ms, 1e-3 * bound.tpot_ms) for one in outcomes]
    return sum(met) / len(met)


def cell(shares: Sequence[float]) -> str:
    """The mean, with its interval where there are several."""
    if len(shares) < 2:
        return f"{100 * shares[0]:.0f}"
    half = 1.96 * statistics.stdev(shares) / len(shares) ** 0.5
    return f"{100 * statistics.mean(shares):.1f} ± {100 * half:.1f}"


def percentiles(outcomes: Sequence[RequestOutcome]) -> str:
    ttft = sorted(one.ttft_s for one in outcomes if not one.failure)
    itl = sorted(one.itl_s for one in outcomes if not one.failure)
    at = [f"{1e3 * ttft[int(part * (len(ttft) - 1))]:,.0f}" for part in (0.5, 0.9, 0.99)]
    at += [f"{1e3 * itl[int(part * (len(itl) - 1))]:.0f}" for part in (0.5, 0.99)]
    return f"TTFT {'/'.join(at[:3])} TPOT {'/'.join(at[3:])}, failed {sum(bool(one.failure) for one in outcomes)}"


def main() -> None:
    if os.environ.get(_HASH_SEED) != "0":
        # Sets of workers have one order in every process then, as in `headrace simulate`.
        arguments = [sys.executable, "-m", "bench.simulation.paced", *sys.argv[1:]]
        os.execve(sys.executable, arguments, {**os.environ, _HASH_SEED: "0"})
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ways", default="pools-3-1,both")
    parser.add_argument("--rates", default="2.75,3.5", help="requests per second")
    parser.add_argument("--seeds", default="7")
    parser.add_argument("--seconds", type=float, default=30.0, help="of arrivals in a block")
    parser.add_argument("--drain", type=float, default=20.0, help="seconds after the last arrival")
    parser.add_argument("--bounds-of", default="0,1,2,3", help="of workers of both roles")
    parser.add_argument("--load", choices=LOADS, default="plain")
    parser.add_argument("--accelerator", choices=ACCELERATORS, default="70b-4xh100")
    parser.add_argument("--slowness", type=float, default=4.0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--refuse", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--times", action="store_true")
    options = parser.parse_args()
    pace = ACCELERATORS[options.accelerator].slower(options.slowness)
    alone = alone_of(pace, _STEP_TOKENS)
    seeds = [int(one) for part in options.seeds.split(",") for one in _range(part)]
    rates = [float(one) for one in options.rates.split(",")]
    chosen = [FACTORS[int(one)] for one in options.bounds_of.split(",")]
    print("| way | rate |", " | ".join(f"{first:g} x, {later:g} x" for first, later in chosen), "|")
    print("|---|---" + "|---" * len(chosen) + "|")
    with ProcessPoolExecutor(options.processes) as pool:
        for way in options.ways.split(","):
            for rate in rates:
                carried: list[Factors | None] = list(chosen) if way == "both" else [None]
                found = {
                    one: list(pool.map(partial(replayed, options, way, rate, one), seeds))
                    for one in carried
                }
                cells = [
                    cell(
                        [
                            share(one, alone.times(factors))
                            for one in found.get(factors, found.get(None, []))
                        ]
                    )
                    for factors in chosen
                ]
                print(f"| {way} | {rate:g} | {' | '.join(cells)} |", flush=True)
                if options.times:
                    for one, blocks in found.items():
                        print(
                            "   ",
                            one,
                            percentiles([o for block in blocks for o in block]),
                            flush=True,
                        )


def _range(part: str) -> range:
    first, _, last = part.partition("-")
    return range(int(first), int(last or first) + 1)


if __name__ == "__main__":
    main()
