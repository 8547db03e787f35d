"""A sender's thread that does not run: the test takes the turns of its one loop."""

from __future__ import annotations

from headrace_kv.send.sender import SenderThread, SendLoop


class ManualThread(SenderThread):
    """For one RankSender."""

    loop: SendLoop

    def __init__(self) -> None:
        super().__init__("not started")

    def add(self, loop: SendLoop) -> None:
        self.loop = loop
