"""How long the threads of processes have waited for a core."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType


class CoreWaits:
    """Reads proc_pid_schedstat(5) of the threads that the processes have now. Use it as a context manager."""

    def __init__(self, process_ids: Iterable[int]) -> None:
        self._files = [
            os.open(thread / "schedstat", os.O_RDONLY)
            for process_id in process_ids
            for thread in Path(f"/proc/{process_id}/task").iterdir()
        ]

    def __enter__(self) -> CoreWaits:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for file in self._files:
            os.close(file)

    def total_us(self) -> int:
        """All waits until now, in microseconds. Threads that have ended count no longer."""
        total_ns = 0
        for file in self._files:
            with suppress(ProcessLookupError):
                total_ns += int(os.pread(file, 100, 0).split()[1])
        return total_ns // 1_000
