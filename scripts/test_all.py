"""Runs the long checks target by target: python scripts/test_all.py [--from TARGET | --only TARGET ... | --each-change]

`--each-change` runs what CI runs for each change beside `make lint` and `make test`: some short targets, and one of the
long ones, in turn by the number of commits. A target that fails there runs once more, as a failed test does.

A failed target does not keep later ones from running. At the end a table has the result, the seconds and the reason of
each. Results are stored after each target, so `--from` continues an earlier run, and the table has both. The output of
a target is in `build/test-all/TARGET.log`. The exit status is 1 when a target of the table has failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
FOLDER: Final = ROOT / "build/test-all"
LIMITS_S: Final = {
    "docs": 600,
    "test-deployments": 3600,
    "test-clients": 2400,
    "test-vllm": 5400,
    "test-rdma": 3600,
    "test-rdma-vllm": 3600,
    "test-quickstart": 600,
    "test-install": 3600,
    "test-images": 3600,
    "test-kube": 3600,
}
"""Targets of the Makefile in the order of their runs, with the seconds that each may take."""
_DEPLOYMENTS: Final = "DEPLOYMENT_TESTS=not vllm and not kube and not core and not in_turn"
EACH_CHANGE: Final = (
    ("docs",),
    ("test-quickstart",),
    ("test-install", "ARGS=--one"),
    ("test-deployments", _DEPLOYMENTS),
)
"""Targets with variables of make that each change runs. `test-deployments` has the test of `test-upgrade`."""
_VLLM: Final = "VLLM_TESTS=vllm and not core"
IN_TURN: Final = (
    ("test-vllm", _VLLM, "ARGS=--part 1/6"),
    ("test-clients",),
    ("test-vllm", _VLLM, "ARGS=--part 2/6"),
    ("test-rdma",),
    ("test-vllm", _VLLM, "ARGS=--part 3/6"),
    ("test-kube",),
    ("test-vllm", _VLLM, "ARGS=--part 4/6"),
    ("test-deployments", "DEPLOYMENT_TESTS=in_turn"),
    ("test-vllm", _VLLM, "ARGS=--part 5/6"),
    ("test-install",),
    ("test-vllm", _VLLM, "ARGS=--part 6/6"),
    ("test-images",),
)
"""Each change runs one of them. One that its limit cuts off has not failed."""
IN_TURN_LIMIT_S: Final = 900
_NOT_DONE: Final = "not done in"
_KILL_S: Final = 30.0
_SKIPPED: Final = re.compile(r"^SKIPPED(?: \[\d+\] \S+)?:? (.+)$", re.MULTILINE)
_REASON: Final = re.compile(r"^(?:FAILED|ERROR|E  |make: \*\*\*|error:|.*Error:).*$", re.MULTILINE)
_REASON_CHARACTERS: Final = 160


@dataclass(frozen=True, slots=True)
class Result:
    """How a target ended. `notes` are the reason of a failure, or what was skipped and why."""

    target: str
    result: str
    seconds: int
    notes: list[str]


def run(target: str, limit_s: float, variables: Sequence[str] = ()) -> Result:
    """Runs `make TARGET VARIABLES`. Ends it with all its children after `limit_s`."""
    log = FOLDER / f"{target}.log"
    started_s = time.monotonic()
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            ("make", target, *variables),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end(process)
    return judge(
        target,
        status,
        limit_s,
        int(time.monotonic() - started_s),
        log.read_text("utf-8", "replace"),
    )


def run_each_change(commits: int) -> list[Result]:
    """Runs EACH_CHANGE and the target in turn after so many commits."""
    chosen = [(LIMITS_S[target], target, given) for target, *given in EACH_CHANGE]
    turn, *variables = IN_TURN[commits % len(IN_TURN)]
    results = []
    for limit_s, target, given in (*chosen, (IN_TURN_LIMIT_S, turn, variables)):
        print("make", target, *given, flush=True)
        result = run(target, limit_s, tuple(given))
        if result.result == "failed" and not result.notes[0].startswith(_NOT_DONE):
            print(table([result]), f"make {target}, once more", sep="\n", flush=True)
            again = run(target, limit_s, tuple(given))
            result = replace(again, notes=[*again.notes, *(f"at first: {n}" for n in result.notes)])
        results.append(result)
    if results[-1].result == "failed" and results[-1].notes[0].startswith(_NOT_DONE):
        results[-1] = replace(results[-1], result="cut off")
    return results


def count_commits() -> int:
    """The commits up to the one that is checked out."""
    command = ("git", "rev-list", "--count", "HEAD")
    return int(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)


def judge(target: str, status: int | None, limit_s: float, seconds: int, output: str) -> Result:
    """The result from an exit status, None after the limit, and from what the target has printed."""
    skipped = list(dict.fromkeys(_SKIPPED.findall(output)))
    if status == 0:
        ran = re.search(r"\d+ passed|passed$", output, re.MULTILINE)
        return Result(target, "passed" if ran or not skipped else "skipped", seconds, skipped)
    if status is None:
        return Result(target, "failed", seconds, [f"{_NOT_DONE} {limit_s:.0f} s"])
    found = _REASON.findall(output)
    failed = [line for line in found if line.startswith(("FAILED", "ERROR"))]
    last = (found or output.splitlines() or ["no output"])[-1:]
    return Result(target, "failed", seconds, failed or last)


def table(results: Sequence[Result]) -> str:
    """One row for each target."""
    width = max(len(one.target) for one in results)
    lines = [f"{'target':{width}}  result    seconds  reason"]
    for one in results:
        notes = [note[:_REASON_CHARACTERS] for note in one.notes] or [""]
        if one.result == "passed":
            notes = [f"skipped: {note}" if note else "" for note in notes]
        lines.append(f"{one.target:{width}}  {one.result:8}  {one.seconds:7}  {notes[0]}")
        lines += [f"{'':{width}}  {'':8}  {'':7}  {note}" for note in notes[1:]]
    return "\n".join(line.rstrip() for line in lines)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends what is left of the target."""
    for number, wait_s in ((signal.SIGTERM, _KILL_S), (signal.SIGKILL, _KILL_S)):
        try:
            os.killpg(process.pid, number)
            process.wait(wait_s)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    targets = list(LIMITS_S)
    parser.add_argument("--from", dest="first", choices=targets, help="continue with this target")
    parser.add_argument("--only", nargs="+", choices=targets, help="run these targets")
    parser.add_argument(
        "--each-change", action="store_true", help="run what CI runs for each change"
    )
    options = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    if options.each_change:
        changed = run_each_change(count_commits())
        print(table(changed))
        return int(any(one.result == "failed" for one in changed))
    file = FOLDER / "results.json"
    resumes = options.first or options.only
    results: dict[str, Result] = {}
    if resumes and file.exists():
        results = {one["target"]: Result(**one) for one in json.loads(file.read_text("utf-8"))}
    chosen = options.only or targets[targets.index(options.first) if options.first else 0 :]
    for target in chosen:
        print(f"make {target}", flush=True)
        results[target] = run(target, LIMITS_S[target])
        rows = [asdict(results[name]) for name in targets if name in results]
        file.write_text(json.dumps(rows, indent=1), "utf-8")
    ordered = [results[name] for name in targets if name in results]
    print(table(ordered))
    return int(any(one.result == "failed" for one in ordered))


if __name__ == "__main__":
    sys.exit(main())
