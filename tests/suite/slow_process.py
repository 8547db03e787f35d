"""A service that a test slows down while it runs, by seconds in files: `link` and `layer`.

`link`: the writes to the decode rank SLOW_RANK land later. `layer`: layer SLOW_LAYER computes longer. The other names
end with that of the process: `step.NAME` stops its engine's steps while the file is there, `loop.NAME` its event loop.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from headrace_cli.up.supervisor import ChildProcess, Spawn
from headrace_cli.up.topology import ProcessSpec
from headrace_engine.connector.step_planner import StepPlanner
from headrace_engine.sim.ranks import Ranks
from headrace_engine.sim.stepper import Stepper
from headrace_kv.send.writes import Writes
from headrace_kv.transport.staging import StagedTransport

SLOW_RANK: Final = 1
SLOW_LAYER: Final = 1
_FOLDER = "HEADRACE_TEST_SLOW_FOLDER"
_PROGRAM = "HEADRACE_TEST_SLOW_PROGRAM"
_NAME = "HEADRACE_TEST_SLOW_NAME"
_POLL_S: Final = 0.02


@dataclass(frozen=True, slots=True)
class Delays:
    """Sets the delays of the processes that `spawning` starts."""

    folder: Path

    def set(self, **delays_s: float) -> None:
        """Sets these delays, and ends all others."""
        for path in self.folder.iterdir():
            path.unlink()
        for name, delay_s in delays_s.items():
            (self.folder / name).write_text(str(delay_s))

    def spawning(self, spawn: Spawn, *services: str) -> Spawn:
        """A spawn that starts these services with delays."""

        async def start(spec: ProcessSpec) -> ChildProcess:
            if spec.service not in services:
                return await spawn(spec)
            program = f"headrace_{spec.service}"
            own = {_FOLDER: str(self.folder), _PROGRAM: program, _NAME: spec.name}
            arguments = tuple(
                "tests.suite.slow_process" if text == program else text for text in spec.arguments
            )
            return await spawn(
                replace(spec, arguments=arguments, environment={**spec.environment, **own})
            )

        return start


def _delay_s(name: str) -> float:
    path = Path(os.environ[_FOLDER]) / name
    return float(path.read_text()) if path.exists() else 0.0


class _Write(threading.local):
    """The write that this thread gives to its transport."""

    late_s = 0.0


_WRITE: Final = _Write()


def _with_late_writes(start: Callable[..., Any]) -> Callable[..., Any]:
    def late(writes: Any, write: Any, *arguments: Any) -> Any:
        _WRITE.late_s = _delay_s("link") if write.destination_rank == SLOW_RANK else 0.0
        return start(writes, write, *arguments)

    return late


def _landing_late(submit: Callable[..., Any]) -> Callable[..., Any]:
    def late(*arguments: Any) -> Any:
        landed: Future[Any] = submit(*arguments)
        if not _WRITE.late_s:
            return landed
        reported: Future[Any] = Future()
        late_s = _WRITE.late_s

        def report() -> None:
            error = landed.exception()
            if error is not None:
                reported.set_exception(error)
            else:
                reported.set_result(landed.result())

        landed.add_done_callback(lambda _: threading.Timer(late_s, report).start())
        return reported

    return late


def _with_slow_layer(written: Callable[..., Any]) -> Callable[..., Any]:
    def slow(ranks: Any, layer: int) -> None:
        if layer == SLOW_LAYER:
            time.sleep(_delay_s("layer"))
        written(ranks, layer)

    return slow


def _with_stops(run: Callable[..., Any]) -> Callable[..., Any]:
    name = os.environ[_NAME]

    async def stopped(*arguments: Any, **named: Any) -> None:
        while _delay_s(f"loop.{name}"):
            time.sleep(_POLL_S)  # noqa: ASYNC251 - this stops the event loop
        while _delay_s(f"step.{name}"):
            await asyncio.sleep(_POLL_S)
        await run(*arguments, **named)

    return stopped


def _with_stopped_steps(plan: Callable[..., Any]) -> Callable[..., Any]:
    """For vLLM's scheduler, in a process of its own."""

    def stopped(*arguments: Any) -> Any:
        while _delay_s(f"step.{os.environ[_NAME]}"):
            time.sleep(_POLL_S)
        return plan(*arguments)

    return stopped


def _wrap(
    owner: Any, name: str, wrapped: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    setattr(owner, name, wrapped(getattr(owner, name)))


if __name__ == "__main__":
    _wrap(Writes, "start", _with_late_writes)
    _wrap(StagedTransport, "submit", _landing_late)
    _wrap(Ranks, "layer_written", _with_slow_layer)
    _wrap(Stepper, "compute", _with_stops)
    _wrap(StepPlanner, "plan_step", _with_stopped_steps)
    importlib.import_module(f"{os.environ[_PROGRAM]}.__main__").main()
