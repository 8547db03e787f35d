"""Calls of a container engine: each has a limit, and each failure has the engine's words."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

CALL_TIMEOUT_S: Final = 60.0
REMOVE_TIMEOUT_S: Final = 60.0


class ContainerError(Exception):
    """A call failed, or did not end in time."""


@dataclass(frozen=True, slots=True)
class Engine:
    """`program` is docker or podman, or a script that calls one of them."""

    program: Path

    def attempt(
        self, *arguments: str, timeout_s: float = CALL_TIMEOUT_S
    ) -> subprocess.CompletedProcess[str]:
        """Runs one command of the engine, whatever its exit status. Raises ContainerError after `timeout_s`."""
        try:
            return subprocess.run(
                [str(self.program), *arguments],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired as error:
            words = " ".join(arguments[:4])
            raise ContainerError(f"`{words}` did not end within {timeout_s:g} s") from error

    def call(self, *arguments: str, timeout_s: float = CALL_TIMEOUT_S) -> str:
        """As `attempt`, and returns what it prints. Raises ContainerError when it fails."""
        done = self.attempt(*arguments, timeout_s=timeout_s)
        if done.returncode:
            words = " ".join(arguments[:4])
            output = (done.stderr + done.stdout).strip()[-2_000:]
            raise ContainerError(f"`{words}` exited with {done.returncode}: {output}")
        return done.stdout

    def inspect(self, kind: str, name: str) -> dict[str, Any]:
        """What the engine knows of a container or an image."""
        found: list[dict[str, Any]] = json.loads(self.call(kind, "inspect", name))
        return found[0]

    def logs(self, container: str, lines: int = 30) -> str:
        """The last lines of a container's log, or why there is none."""
        # Not --tail: with it podman 4.3 leaves out a line that was written in parts.
        try:
            done = self.attempt("logs", container)
        except ContainerError as error:
            return str(error)
        return "\n".join((done.stdout + done.stderr).splitlines()[-lines:])

    def remove(self, containers: Sequence[str], *networks: str) -> None:
        """Ends and removes them, as far as they exist. What the engine does not remove in time is printed."""
        commands: list[tuple[str, ...]] = [
            ("rm", "--force", "--volumes", container) for container in containers
        ]
        commands += [("network", "rm", network) for network in networks]
        for command in commands:
            try:
                self.attempt(*command, timeout_s=REMOVE_TIMEOUT_S)
            except ContainerError as error:
                print(error, flush=True)
