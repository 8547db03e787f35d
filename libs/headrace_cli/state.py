"""The state file of `headrace up`, by which other commands find the deployment, and the lock of its folder."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from headrace_common.errors import ConfigError, NotFound, WorkerGone
from headrace_common.ports import is_loopback

STATE_FILE = "up.json"


@dataclass(frozen=True, slots=True)
class UpState:
    """Addresses of a running deployment, the process id of `headrace up`, and the folder of its logs.

    `planner` is empty without one.
    """

    router: str
    registry: str
    pid: int
    planner: str = ""
    logs: str = ""


def default_folder(port: int) -> Path:
    """The default folder of logs and state, for the deployment with this router port."""
    base = os.environ.get("XDG_STATE_HOME", "")
    root = Path(base) if base else Path.home() / ".local" / "state"
    return root / "headrace" / str(port)


def make_folder(folder: Path) -> Path:
    """Creates the folder and returns its absolute path. Raises ConfigError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot create {folder}: {error.strerror}; name another folder with --logs"
        ) from error
    return folder.resolve()


def write_state(folder: Path, state: UpState) -> None:
    """Writes the file. Raises ConfigError."""
    path = folder / STATE_FILE
    try:
        path.write_text(json.dumps(asdict(state)) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror}; free it, or set XDG_STATE_HOME to another folder"
        ) from error


def clear_state(folder: Path) -> None:
    (folder / STATE_FILE).unlink(missing_ok=True)


def nothing_serves(address: str) -> WorkerGone:
    """The error of every command that finds no deployment."""
    return WorkerGone(
        f"nothing serves on {address}: start a deployment with `headrace up`, or name a running one with "
        "--router HOST:PORT",
        metadata={"address": address},
    )


def find_planner(router: str) -> str:
    """The planner's address in the deployment on this machine with this router. Raises NotFound."""
    state = read_state(router)
    if state is not None and state.planner:
        return state.planner
    raise NotFound(
        f"no planner is known for the router on {router}: start one with headrace up --planner, or name it with "
        "--planner HOST:PORT or HEADRACE_PLANNER",
        metadata={"router": router},
    )


def router_port(router: str) -> int:
    """The port of "host:port"; 0 where it is no number."""
    port = router.rpartition(":")[2]
    return int(port) if port.isdecimal() else 0


def read_state(router: str) -> UpState | None:
    """The deployment that `headrace up` runs on this machine with this router, or None."""
    # A deployment elsewhere may have the port of one here.
    if not is_loopback(router):
        return None
    path = default_folder(router_port(router)) / STATE_FILE
    try:
        return UpState(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


ADD_REQUEST: Final = ".add"
"""Ends the name of a file in the state's folder with the role of a worker to add. `headrace add` writes it."""
ADD_ANSWER: Final = ".added"
"""Ends the name of the answer."""
ADD_FAILED: Final = "failed: "
"""Begins the answer when it could not be added."""
LOCK_FILE: Final = "up.lock"
_TEXT_BYTES_MAX: Final = 256


@contextlib.contextmanager
def locked(folder: Path, address: str) -> Iterator[None]:
    """Holds the lock of a folder. It ends with the process at the latest.

    `address` is for the message of the process that comes second. Raises ConfigError when another process has the lock,
    or when the file cannot be written.
    """
    path = folder / LOCK_FILE
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise cannot_write(path, error) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, _TEXT_BYTES_MAX, 0).decode("utf-8", "replace").strip()
            raise ConfigError(
                f"another deployment uses {folder} ({holder or 'it is starting'}): stop it with `headrace "
                "down`, or give this one another --port, and another folder if you named one with --logs"
            ) from None
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()}, router {address}\n".encode(), 0)
        except OSError as error:
            raise cannot_write(path, error) from error
        yield
    finally:
        os.close(descriptor)


def is_locked(folder: Path) -> bool:
    """Whether a process has the lock of a folder."""
    try:
        with (folder / LOCK_FILE).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def cannot_write(path: Path, error: OSError) -> ConfigError:
    """The error of a file in the folder of logs."""
    return ConfigError(
        f"cannot write {path}: {error.strerror}; free it, or name another folder with --logs"
    )
