"""A sender's thread that does not run: the test takes the turns of its one loop."""

from __future__ import annotations

from concurrent.futures import Future

from headrace_kv.send.sender import SenderThread, SendLoop


class ManualThread(SenderThread):
    """For one RankSender."""

    loop: SendLoop

    def __init__(self) -> None:
        super().__init__("not started")

    def add(self, loop: SendLoop, closed: Future[None]) -> None:
        self.loop = loop
