"""Writes new files of keys, tokens and certificates."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from headrace_common.errors import ConfigError

SECRET_MODE: Final = 0o600
PUBLIC_MODE: Final = 0o644


def write_new(path: Path, content: bytes, mode: int) -> None:
    """Creates a file. Never replaces one: another process may use it. Raises ConfigError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
    except FileExistsError as error:
        raise ConfigError(f"{path} exists; remove it first, or name another file") from error
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; name another file") from error
