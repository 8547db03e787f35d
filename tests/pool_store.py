"""A Mooncake Store on loopback, for tests of remote pools."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil

from tests.freezing import freeze
from tests.waiting import until

LONG_S = 60.0


class Store:
    """A process of the store, with its master as a child."""

    def __init__(
        self, folder: Path, listen: str = "127.0.0.1:0", memory_gib: float = 1 / 16
    ) -> None:
        self._port_file = folder / "pool.port"
        self._port_file.unlink(missing_ok=True)
        self.process = subprocess.Popen(
            [
                sys.executable,
                *("-m", "headrace_kv.tiers.pool_server", f"--listen={listen}"),
                *(f"--memory-gib={memory_gib:g}", f"--port-file={self._port_file}"),
            ]
        )

    @property
    def address(self) -> str:
        return self._port_file.read_text(encoding="utf-8").strip()

    async def wait(self) -> None:
        await until(self._port_file.exists, LONG_S)

    def members(self) -> list[psutil.Process]:
        process = psutil.Process(self.process.pid)
        return [process, *process.children()]

    def freeze(self) -> None:
        freeze(*(member.pid for member in self.members()))

    def signal(self, number: signal.Signals) -> None:
        for member in self.members():
            member.send_signal(number)

    def end(self) -> None:
        if self.process.poll() is None:
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGKILL)
        self.process.wait(LONG_S)
