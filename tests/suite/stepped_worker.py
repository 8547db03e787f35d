"""A worker with the sim engine, of which the test advances the time of computing.

    python -m tests.suite.stepped_worker FLAGS

HEADRACE_TEST_CLOCK is the socket of a ClockController, and HEADRACE_TEST_PROGRAM the worker's module.
"""

from __future__ import annotations

import os
import runpy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from headrace_cli.up.supervisor import ChildProcess, Spawn
from headrace_cli.up.topology import ProcessSpec
from headrace_engine.sim import engine
from tests.sim_clock import RemoteClock

_CLOCK: Final = "HEADRACE_TEST_CLOCK"
_PROGRAM: Final = "HEADRACE_TEST_PROGRAM"


def stepping(spawn: Spawn, clock: Path, *roles: str) -> Spawn:
    """A spawn that starts workers of these roles with a clock of the controller at `clock`."""

    async def start(spec: ProcessSpec) -> ChildProcess:
        if spec.service not in roles:
            return await spawn(spec)
        program = f"headrace_{spec.service}"
        own = {_CLOCK: str(clock), _PROGRAM: program}
        arguments = tuple(
            "tests.suite.stepped_worker" if text == program else text for text in spec.arguments
        )
        return await spawn(
            replace(spec, arguments=arguments, environment={**spec.environment, **own})
        )

    return start


if __name__ == "__main__":
    vars(engine)["SimClock"] = partial(RemoteClock, os.environ[_CLOCK])
    runpy.run_module(os.environ[_PROGRAM], run_name="__main__", alter_sys=True)
