"""A session fixture that fails at its start does not start again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

import pytest


class FirstFailure:
    """Repeats the first error at the start of a fixture. pytest records it, but pytest-rerunfailures deletes the record
    after each test which it may rerun (tests/standstill.py). The fixture would then start again for each test.
    """

    def __init__(self) -> None:
        self._error: BaseException | None = None
        self._traceback: TracebackType | None = None

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """Raises the first error of this block, at once when there is one."""
        if self._error is not None:
            raise self._error.with_traceback(self._traceback)
        try:
            yield
        # pytest.fail.Exception is raised by the time limit of a test.
        except (Exception, pytest.fail.Exception) as error:
            self._error, self._traceback = error, error.__traceback__
            raise
