"""Results as lines on the machine's console."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

LOGS = Path("/tmp/logs")
MARK = "HEADRACE-RDMA "
_LOG_LINES = 25


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of one case. `note` states the proof, or the error."""

    name: str
    passed: bool
    duration_s: float
    note: str


def write_result(result: Result) -> None:
    """Writes one line."""
    print(f"\n{MARK}{json.dumps(asdict(result))}", flush=True)


def write_failure(name: str, note: str) -> None:
    """Writes the result of a case that did not run to its end."""
    write_result(Result(name, passed=False, duration_s=0.0, note=note))


def note_of(error: Exception) -> str:
    """The error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def parse(line: str) -> Result | None:
    """Parses the result in a console's line, if it holds one."""
    _, mark, text = line.partition(MARK)
    try:
        return Result(**json.loads(text)) if mark else None
    except (ValueError, TypeError):
        return None


def run_case(name: str, case: Callable[[], str]) -> None:
    """Runs and reports one case, which returns its note."""
    started_s = time.monotonic()
    try:
        note, passed = case(), True
    # Any exception of a case is its result.
    except Exception as error:  # noqa: BLE001
        traceback.print_exc()
        note, passed = note_of(error), False
    write_result(Result(name, passed, time.monotonic() - started_s, note))


def show_logs(*patterns: str) -> None:
    """Prints the last lines of the services' logs on the console."""
    for log in sorted({path for pattern in patterns for path in LOGS.glob(pattern)}):
        print(f"--- {log.name}")
        print("\n".join(log.read_text(errors="replace").splitlines()[-_LOG_LINES:]), flush=True)
