"""Mutate the planning, counting, leasing and sending of KV, and see that the tests notice.

    python -m tests.mutation [--seed 7] [--count 30] [--list]

Each mutation is made in a copy of headrace_kv, and the tests run on that copy, the quick ones first. A mutant that
every test passes has survived: either a test is missing, or the mutation changes nothing that a caller can see and
stands in EQUIVALENT with the reason. The exit status is 1 when one survives unnamed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from pathlib import Path
from typing import Final

from tests.mutation.equivalent import EQUIVALENT
from tests.mutation.mutants import Site, apply, find_sites, sample

ROOT: Final = Path(__file__).resolve().parents[2]
PACKAGE: Final = ROOT / "libs/headrace_kv"
MODULES: Final = ("plan/*.py", "receive/ledger.py", "handoff/leases.py", "send/*.py")
STAGES: Final = (
    ("unit", ("tests/unit/kv",)),
    ("model", ("tests/model",)),
    ("component", ("tests/component/kv", "tests/component/engine/sim")),
)
STAGE_TIMEOUT_S: Final = 400.0


def run_stage(copies: Path, folders: tuple[str, ...]) -> bool:
    """Runs tests on the copied package. Returns whether all passed."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        options = tomllib.load(file)["tool"]["pytest"]["ini_options"]
    path = " ".join((str(copies), *options["pythonpath"]))
    command = (
        *(sys.executable, "-m", "pytest", "-q", "-x", "-m", "not vllm", "--numprocesses", "2"),
        *("-p", "no:cacheprovider", "--timeout", "60", "-o", f"pythonpath={path}", *folders),
    )
    environment = {**os.environ, "PYTHONPATH": str(copies), "HEADRACE_MODEL_EVERY": "40"}
    try:
        ended = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=STAGE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    if ended.returncode not in (0, 1, 2):
        raise SystemExit(f"pytest ended with {ended.returncode}:\n{ended.stdout}\n{ended.stderr}")
    return ended.returncode == 0


def killed_by(site: Site | None) -> str:
    """The first stage that fails with the mutation made; empty when the mutant survives."""
    with tempfile.TemporaryDirectory() as folder:
        copies = Path(folder)
        shutil.copytree(
            PACKAGE, copies / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__")
        )
        if site is not None:
            mutated = copies / PACKAGE.name / site.module
            mutated.write_text(apply(mutated.read_text(encoding="utf-8"), site), encoding="utf-8")
        return next((name for name, folders in STAGES if not run_stage(copies, folders)), "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--list", action="store_true", help="name the mutations, run nothing")
    arguments = parser.parse_args()
    modules = sorted({path for pattern in MODULES for path in PACKAGE.glob(pattern)})
    sites = {
        name: find_sites(name, path.read_text(encoding="utf-8"))
        for path in modules
        if (name := path.relative_to(PACKAGE).as_posix()) and path.name != "__init__.py"
    }
    chosen = sample(sites, arguments.count, arguments.seed)
    if arguments.list:
        print("\n".join(map(str, chosen)))
        return 0
    if stage := killed_by(None):
        print(f"the tests of stage {stage} fail without a mutation")
        return 2
    ends: Counter[str] = Counter()
    for site in chosen:
        start_s = time.monotonic()
        end = killed_by(site)
        if not end:
            end = "equivalent" if EQUIVALENT.get(site.key) else "SURVIVED"
        ends[end] += 1
        print(f"{end:10} {time.monotonic() - start_s:5.0f} s  {site}", flush=True)
    print(", ".join(f"{count} {end}" for end, count in sorted(ends.items())))
    return 1 if ends["SURVIVED"] else 0


if __name__ == "__main__":
    sys.exit(main())
