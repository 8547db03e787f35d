"""The services of the previous release, from this repository's history, as processes beside those of this tree."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from headrace_cli.up.supervisor import ChildProcess, Spawn
from headrace_cli.up.topology import ProcessSpec
from tests.unit.test_architecture import ROOT

PREVIOUS_COMMIT = "76c5c36a64e6c35e4768589c6d45b001be3ec1f9"
"""Version 0.1.0."""
COMMIT_VARIABLE = "HEADRACE_PREVIOUS_COMMIT"
_PATHS = ("libs", "protos", "scripts", "services", "tests", "pyproject.toml")
_SERVICES = ("registry", "router", "prefill", "decode")
_TIMEOUT_S = 120.0


def previous_release() -> Path:
    """The folder with the sources and stubs of the previous release. Skips the test where history lacks them."""
    commit = os.environ.get(COMMIT_VARIABLE, PREVIOUS_COMMIT)
    known = _git("rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}")
    if known.returncode != 0:
        pytest.skip(f"this clone has no commit {commit}, so it has no previous release")
    folder = ROOT / ".cache" / "releases" / known.stdout.decode().strip()
    if not folder.is_dir():
        _unpack(commit, folder)
    return folder


@contextmanager
def forks_of(tree: Path) -> Iterator[socket.socket]:
    """A connection to the fork server of the tests of a release, which has imported the services of that release."""
    with (
        tempfile.TemporaryDirectory(prefix="headrace-previous-") as name,
        socket.socket(socket.AF_UNIX) as listener,
    ):
        path = Path(name) / "socket"
        listener.bind(str(path))
        listener.listen()
        folders = [tree, tree / "libs", *(tree / "services" / one for one in _SERVICES)]
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.fork_server", "sim", str(listener.fileno())],
            cwd=tree,
            stdin=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))},
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(str(path))
                yield connection
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(_TIMEOUT_S)


def mixing(previous: Spawn, old: set[str]) -> Callable[[Spawn], Spawn]:
    """For `suite(spawning=...)`: starts the processes named in `old` by `previous`, and all others from this tree.

    A process that restarts after its name was removed from `old` is of this tree.
    """

    def spawning(spawn: Spawn) -> Spawn:
        async def start(spec: ProcessSpec) -> ChildProcess:
            if spec.name not in old:
                return await spawn(spec)
            if spec.service in ("prefill", "decode"):
                # Workers of 0.1 have a setting for it.
                spec = replace(spec, arguments=(*spec.arguments, "--engine=sim"))
            return await previous(spec)

        return start

    return spawning


def _unpack(commit: str, folder: Path) -> None:
    """Writes the sources and stubs of a commit. A reader never sees half of them."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    archive = _git("archive", "--format=tar", commit, *_PATHS)
    assert archive.returncode == 0, archive.stderr.decode()
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        draft = Path(name) / "tree"
        draft.mkdir()
        subprocess.run(
            ["tar", "-xf", "-", "-C", draft], input=archive.stdout, check=True, timeout=_TIMEOUT_S
        )
        subprocess.run(
            [sys.executable, draft / "scripts" / "compile_protos.py", draft / "libs"],
            check=True,
            timeout=_TIMEOUT_S,
        )
        try:
            draft.rename(folder)
        except OSError:
            # Another test run was first.
            assert folder.is_dir()
            shutil.rmtree(draft)


def _git(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, check=False, timeout=_TIMEOUT_S
    )
