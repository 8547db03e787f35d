"""Keeps two deployments out of one folder."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from headrace_common.errors import ConfigError

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
        raise _cannot_write(path, error) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, _TEXT_BYTES_MAX, 0).decode("utf-8", "replace").strip()
            raise ConfigError(
                f"another deployment uses {folder} ({holder or 'it is starting'}): stop it, or give this one another "
                "--port, and another folder if you named one with --logs"
            ) from None
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()}, router {address}\n".encode(), 0)
        except OSError as error:
            raise _cannot_write(path, error) from error
        yield
    finally:
        os.close(descriptor)


def _cannot_write(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot write {path}: {error.strerror}; free it, or name another folder with --logs"
    )
