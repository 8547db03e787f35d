"""Compares the regret of placement among workers of both roles with replays in which the other decision is forced.

    python -m bench.simulation.regret [--sample 30] [--output bench/results]

Each load is replayed once in the simulator. Then it is replayed again for each other decision with an estimate of
`sample` requests. In that replay the request gets the other decision, and all before it is the same. The table
compares the estimate of its time from the decision to the first token with what the replay shows. The estimate knows
the decision's inputs and what was observed of the decision that was made. The target is a difference of at most 15 %
for 90 % of the requests, by the best other decision of each.
The simulated workers have the times of the profile, so errors of learned times are not in the table. A simulated
hand-over takes no time for messages, and placement expects 20 ms of them: the estimates here are without.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from bench.simulation.make_trace import Conversations, conversation_entries, day_entries
from headrace_planner.settings import WorkerProfile, read_profile
from headrace_router.costs import MESSAGES_S, Candidates, OtherDecision
from headrace_router.placement import Decision, Placement, PlacementRequest
from headrace_simulator.job import RequestOutcome
from headrace_simulator.replay import simulate
from headrace_simulator.settings import SimulationSettings
from headrace_simulator.trace import TraceRequest, read_trace

FOLDER: Final = Path("bench/simulation")
ERROR_MAX, SHARE_MIN = 0.15, 0.9
_HOUR_MS: Final = 3.6e6
_WARM_S: Final = 60.0
_HASH_SEED: Final = "PYTHONHASHSEED"


@dataclass(frozen=True, slots=True)
class Load:
    """A trace and a deployment of workers of both roles. Without `start_h` the trace is of conversations."""

    name: str
    profile: str
    workers: int
    seconds: float
    scale: float = 1.0
    start_h: float | None = None
    ttft_s: float = 5.0
    itl_s: float = 0.1

    def trace(self) -> list[TraceRequest]:
        """The requests. No two arrive at one time, so that a time names one."""
        if self.start_h is None:
            shape = Conversations(starts_per_s=self.scale * Conversations().starts_per_s)
            entries = list(conversation_entries(shape, 1, self.seconds))
        else:
            from_ms = self.start_h * _HOUR_MS
            until_ms = from_ms + 1e3 * self.seconds
            entries = [
                one for one in day_entries(1, self.scale) if from_ms <= one["timestamp"] < until_ms
            ]
        requests = read_trace(map(json.dumps, entries))
        first_s = requests[0].arrival_s
        moved = (
            replace(one, arrival_s=one.arrival_s - first_s + 1e-5 * one.number) for one in requests
        )
        return sorted(moved, key=lambda one: one.arrival_s)


LOADS: Final = (
    Load("day, long prompts", "example-profile.json", 6, 300, start_h=8),
    Load("day, long prompts, 1.5 times as many", "example-profile.json", 6, 300, 1.5, 10),
    Load("day, long answers", "example-profile.json", 6, 300, start_h=12.5),
    Load("day, long answers, 1.3 times as many", "example-profile.json", 6, 300, 1.3, 12.5),
    Load("conversations", "example-conversation-profile.json", 8, 900),
    Load(
        "conversations, fast workers",
        "example-large-profile.json",
        4,
        200,
        10,
        ttft_s=2,
        itl_s=0.05,
    ),
)


@dataclass(frozen=True, slots=True)
class Placed:
    """A decision. `call` is its number, and `request_s` the arrival of the request."""

    call: int
    time_s: float
    request_s: float
    decision: Decision


class Recording(Placement):
    """Records the decisions of `inner` by the arrival of the request. Decision number `call` is replaced by `other`."""

    def __init__(self, inner: Placement, call: int, other: OtherDecision | None) -> None:
        self._inner = inner
        self._call = call
        self._other = other
        self._calls = 0
        self.placed: dict[float, Placed] = {}

    def choose(self, request: PlacementRequest, candidates: Candidates) -> Decision:
        decision = self._inner.choose(request, candidates)
        self._calls += 1
        if self._other is not None and self._calls == self._call:
            decision = forced(decision, self._other, request, candidates)
        now_s = time.monotonic()
        arrival_s = round(now_s - request.targets.elapsed_s, 6)
        self.placed[arrival_s] = Placed(self._calls, now_s, arrival_s, decision)
        return decision


def forced(
    decision: Decision, other: OtherDecision, request: PlacementRequest, candidates: Candidates
) -> Decision:
    """The other decision in place of one that was made."""
    refs = [worker.ref for worker in candidates.decode.workers]
    needed, cached = request.prompt_tokens - 1, 0
    if candidates.cached_tokens is not None:
        cached = int(min(needed, candidates.cached_tokens[refs.index(other.prefill)]))
    remote = other.prefill != other.worker.ref
    return replace(
        decision,
        worker=other.worker,
        remote=remote,
        prefill=other.prefill if remote else None,
        missing_tokens=needed - cached,
        cached_tokens=cached,
    )


def replayed(
    load: Load,
    worker: WorkerProfile,
    trace: list[TraceRequest],
    call: int = 0,
    other: OtherDecision | None = None,
) -> tuple[dict[float, Placed], dict[float, RequestOutcome]]:
    """The decisions and the outcomes, by arrival."""
    recordings: list[Recording] = []
    outcomes: list[RequestOutcome] = []

    def wrap(inner: Placement) -> Placement:
        recordings.append(Recording(inner, call, other))
        return recordings[0]

    settings = SimulationSettings(both_workers=load.workers, ttft_s=load.ttft_s, itl_s=load.itl_s)
    simulate(settings, worker, trace, wrap=wrap, on_ended=outcomes.append)
    return recordings[0].placed, {round(one.arrival_s, 6): one for one in outcomes}


def first_s(placed: Placed, outcomes: dict[float, RequestOutcome]) -> float:
    """From the decision to the first token."""
    return placed.request_s + outcomes[placed.request_s].ttft_s - placed.time_s


def estimates(placed: Placed, outcome: RequestOutcome) -> list[tuple[float, OtherDecision]]:
    """As a router makes them. A simulated hand-over has no messages."""
    prompt_s = placed.request_s + outcome.ttft_s - placed.time_s
    return [
        (way.estimate_s(prompt_s) - MESSAGES_S * (way.prefill != way.worker.ref), way)
        for way in placed.decision.others
    ]


@dataclass(frozen=True, slots=True)
class Forced:
    """One other decision with an estimate. `is_best`: no other one of the request has an earlier estimate."""

    kind: str
    is_best: bool
    observed_s: float
    estimate_s: float
    really_s: float

    @property
    def error(self) -> float:
        """Relative to what the forced decision gave."""
        return abs(self.estimate_s - self.really_s) / self.really_s


def forced_decisions(load: Load, sample: int) -> tuple[int, list[Forced]]:
    """How many requests were drawn, and all other decisions with an estimate of these."""
    worker = read_profile(FOLDER / load.profile)
    assert worker is not None
    trace = load.trace()
    placed, outcomes = replayed(load, worker, trace)
    warm = [one for one in placed.values() if one.request_s >= _WARM_S]
    drawn = random.Random(1).sample(warm, min(sample, len(warm)))
    found: list[Forced] = []
    for one in drawn:
        observed_s = first_s(one, outcomes)
        others = estimates(one, outcomes[one.request_s])
        _, best = min(others, key=lambda pair: pair[0], default=(0.0, None))
        for estimate_s, other in others:
            # Later requests cannot change its first token, unless that comes after this.
            until_s = one.time_s + 3.0 * max(observed_s, estimate_s) + 1.0
            begun = [request for request in trace if request.arrival_s < until_s]
            again, again_outcomes = replayed(load, worker, begun, one.call, other)
            assert again[one.request_s].time_s == one.time_s
            really_s = first_s(again[one.request_s], again_outcomes)
            found.append(Forced(other.kind, other is best, observed_s, estimate_s, really_s))
    return len(drawn), found


def row(name: str, drawn: str, several: list[Forced]) -> str:
    """A line of the table."""
    errors = sorted(one.error for one in several)
    cells = [name, drawn, f"{len(several)}"]
    if errors:
        near = sum(error <= ERROR_MAX for error in errors) / len(errors)
        middle, high = (errors[int(part * (len(errors) - 1))] for part in (0.5, 0.9))
        sums_s = [
            sum(max(0.0, one.observed_s - first) for one, first in pairs)
            for pairs in (
                [(one, one.estimate_s) for one in several],
                [(one, one.really_s) for one in several],
            )
        ]
        cells += [f"{near:.0%}", f"{middle:.1%}, {high:.1%}", f"{sums_s[0]:.2f}, {sums_s[1]:.2f}"]
    else:
        cells += ["-"] * 3
    return "| " + " | ".join(cells) + " |"


def _head(first: str) -> list[str]:
    titles = [first, "requests drawn", "with an estimate", "within 15 %", "error p50, p90"]
    titles.append("sum of regret, estimated and forced, s")
    return ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]


def main() -> None:
    if os.environ.get(_HASH_SEED) != "0":
        # Sets of workers have one order in every process then, as in `headrace simulate`.
        arguments = [sys.executable, "-m", "bench.simulation.regret", *sys.argv[1:]]
        os.execve(sys.executable, arguments, {**os.environ, _HASH_SEED: "0"})
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample", type=int, default=30, help="requests of each load")
    parser.add_argument("--output", type=Path, help="folder for the table")
    options = parser.parse_args()
    text = ["# Regret beside forced decisions", ""]
    text += ["`python -m bench.simulation.regret`: what it does is in its docstring.", ""]
    text += _head("load")
    print("\n".join(text), flush=True)
    every: list[Forced] = []
    for load in LOADS:
        drawn, found = forced_decisions(load, options.sample)
        every += found
        text.append(row(load.name, str(drawn), [one for one in found if one.is_best]))
        print(text[-1], flush=True)
    best = [one for one in every if one.is_best]
    near = sum(one.error <= ERROR_MAX for one in best) / max(1, len(best))
    met = "reached" if near >= SHARE_MIN else "missed"
    rest = [
        *("", f"All loads: {near:.1%} of {len(best)} within 15 %. The target of 90 % is {met}."),
        *("", "All other decisions with an estimate, whether the best or not, over all loads:", ""),
        *_head("kind"),
    ]
    kinds = sorted({one.kind for one in every})
    rest += [row(kind, "", [one for one in every if one.kind == kind]) for kind in kinds]
    print("\n".join(rest))
    text += rest
    if options.output:
        (options.output / "regret.md").write_text("\n".join([*text, ""]))


if __name__ == "__main__":
    main()
