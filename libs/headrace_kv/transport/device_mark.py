"""Points in the work that is queued on a device."""

from __future__ import annotations

import time
from typing import Final, Protocol

from headrace_common.errors import TransferFailed

_POLL_S: Final = 20e-6


class Mark(Protocol):
    """A point in the work that is queued on a device."""

    def query(self) -> bool:
        """Whether all work before the mark is done. Raises RuntimeError when the device has failed."""


class Passed:
    """The mark of a device that computes in the calling thread."""

    def query(self) -> bool:
        return True


PASSED: Final = Passed()


def wait_for(mark: Mark, timeout_s: float) -> bool:
    """Whether the mark is passed within the time. Polls, because CUDA's own waits have no timeout.

    Raises TransferFailed when the device has failed.
    """
    deadline_s = time.monotonic() + timeout_s
    try:
        while not mark.query():
            if time.monotonic() >= deadline_s:
                return False
            time.sleep(_POLL_S)
    except RuntimeError as error:
        raise TransferFailed(f"the device has failed: {error}") from error
    return True
