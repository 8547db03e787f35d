"""Values that are read from files, and read again when the files change."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Generic, TypeVar

from headrace_common.errors import ConfigError

_LOG = logging.getLogger(__name__)

CHECK_INTERVAL_S: Final = 1.0
"""Time between two looks at the files. A change takes effect with the first use after it."""

T = TypeVar("T")
_Stamp = tuple[tuple[int, int, int] | None, ...]


def read_text(setting: str, path: str) -> str:
    """The text of the file that a setting names. Raises ConfigError."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        cause = getattr(error, "strerror", None) or type(error).__name__
        raise ConfigError(
            f"{setting} {path} cannot be read ({cause}): name a readable text file",
            metadata={setting: path},
        ) from error


class ReloadedFiles(Generic[T]):
    """A value that `read` makes from files, made again when one of them changes. Threads may share it.

    A changed file from which `read` makes no value leaves the old value in force, and is logged as an error.
    `read` raises ConfigError, and its messages contain no secret.
    """

    def __init__(self, paths: Sequence[str], read: Callable[[], T]) -> None:
        """Raises ConfigError when the first value cannot be made."""
        self._paths = tuple(Path(path) for path in paths)
        self._read = read
        self._lock = threading.Lock()
        # A file that changes while it is read has another stamp afterwards, and is read again.
        self._stamp = self._stamp_of_files()
        self._value = read()
        self._checked_s = time.monotonic()

    def current(self) -> T:
        """The value in force."""
        if time.monotonic() - self._checked_s >= CHECK_INTERVAL_S:
            with self._lock:
                self._checked_s = time.monotonic()
                self._reload()
        return self._value

    def _reload(self) -> None:
        stamp = self._stamp_of_files()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._value = self._read()
        except ConfigError as error:
            _LOG.error("the old content stays in force: %s", error.detail)
        else:
            _LOG.info("read again after a change: %s", ", ".join(map(str, self._paths)))

    def _stamp_of_files(self) -> _Stamp:
        return tuple(_stamp_of(path) for path in self._paths)


def _stamp_of(path: Path) -> tuple[int, int, int] | None:
    """What differs after a change. None when there is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size
