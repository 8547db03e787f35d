"""Where `headrace up` leaves word of what it started, so that other commands find it."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from headrace_common.errors import ConfigError, NotFound

STATE_FILE = "up.json"


@dataclass(frozen=True, slots=True)
class UpState:
    """A running deployment."""

    router: str
    registry: str
    pid: int


def default_folder(port: int) -> Path:
    """The folder of logs and state of the deployment whose router has this port."""
    base = os.environ.get("XDG_STATE_HOME", "")
    root = Path(base) if base else Path.home() / ".local" / "state"
    return root / "headrace" / str(port)


def make_folder(folder: Path) -> Path:
    """Creates the folder. Raises ConfigError when that is not possible."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot create {folder}: {error.strerror}; name another folder with --logs"
        ) from error
    return folder.resolve()


def write_state(folder: Path, state: UpState) -> None:
    """Leaves word."""
    (folder / STATE_FILE).write_text(json.dumps(asdict(state)) + "\n", encoding="utf-8")


def clear_state(folder: Path) -> None:
    """Takes the word back."""
    (folder / STATE_FILE).unlink(missing_ok=True)


def find_registry(router: str) -> str:
    """The registry of the deployment on this machine that has this router. Raises NotFound."""
    port = router.rpartition(":")[2]
    path = default_folder(int(port) if port.isdecimal() else 0) / STATE_FILE
    try:
        return UpState(**json.loads(path.read_text(encoding="utf-8"))).registry
    except (OSError, ValueError, TypeError) as error:
        raise NotFound(
            f"no registry is known for the router on {router}: name it with --registry HOST:PORT",
            metadata={"router": router},
        ) from error
