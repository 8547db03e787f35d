"""Reads a SimulationSpec from stdin, and writes one JSON document with the result of each run to stdout."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict
from pathlib import Path

from pydantic import ValidationError

from headrace_common.errors import HeadraceError
from headrace_simulator.replay import simulate
from headrace_simulator.settings import SimulationSpec
from headrace_simulator.trace import read_trace

EXIT_MISCONFIGURED = 2


def main() -> int:
    """Exits with EXIT_MISCONFIGURED and a line on stderr when the input is wrong."""
    try:
        spec = SimulationSpec.model_validate_json(sys.stdin.read())
        limit_s = spec.seconds_max if spec.seconds_max is not None else math.inf
        with Path(spec.trace).open(encoding="utf-8") as lines:
            trace = read_trace(lines, seconds_max=limit_s)
        results = [asdict(simulate(settings, spec.profile, trace)) for settings in spec.runs]
    except (HeadraceError, ValidationError, OSError, UnicodeDecodeError) as error:
        detail = error.detail if isinstance(error, HeadraceError) else str(error)
        sys.stderr.write(f"{' '.join(detail.split())}\n")
        return EXIT_MISCONFIGURED
    sys.stdout.write(json.dumps(results) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
