"""The thread on which ranks' KV is written."""

from __future__ import annotations

import concurrent.futures
import logging
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace_kv.send.loop import SendLoop

_log = logging.getLogger(__name__)

_LINKS_END_S = 4.0
_ENDING_POLL_S = 0.05


@dataclass(slots=True)
class _Sending:
    """A loop that runs here. `links` are its streams' ends, once it has nothing more to send."""

    loop: SendLoop
    closed: concurrent.futures.Future[None]
    links: tuple[concurrent.futures.Future[None], ...] = ()
    end_by_s: float = 0.0


class SenderThread:
    """Runs the send loops of one rank, or of many that need no thread each, for as long as it has any.

    A write that blocks holds up every loop here: ranks that send much have a thread of their own. `changed` guards the
    inboxes of all its loops, and says when something came into one.
    """

    def __init__(self, name: str) -> None:
        self.changed = threading.Condition()
        self._name = name
        self._sending: list[_Sending] = []
        self._running = False

    def add(self, loop: SendLoop, closed: concurrent.futures.Future[None]) -> None:
        """Runs a loop until it is over and its streams have ended, or took too long to; `closed` is done then."""
        with self.changed:
            self._sending.append(_Sending(loop, closed))
            self.changed.notify()
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name=self._name, daemon=True).start()

    def _run(self) -> None:
        while sending := self._wait():
            now_s = time.monotonic()
            for one in sending:
                if one.end_by_s:
                    self._end(one, now_s)
                    continue
                if not _turn(one.loop):
                    one.links = one.loop.close_links()
                    one.end_by_s = now_s + _LINKS_END_S
                    self._end(one, now_s)

    def _wait(self) -> list[_Sending]:
        """Those that have something to do, once there are any; none when all have ended."""
        with self.changed:
            while self._sending:
                now_s = time.monotonic()
                due = [one for one in self._sending if _wait_s(one, now_s) <= 0.0]
                ending = [one for one in self._sending if one.end_by_s]
                if due:
                    return due + ending
                waits_s = [_wait_s(one, now_s) for one in self._sending if not one.end_by_s]
                if ending:
                    waits_s.append(_ENDING_POLL_S)
                if not self.changed.wait(min(waits_s)) and ending:
                    return ending
            self._running = False
            return []

    def _end(self, one: _Sending, now_s: float) -> None:
        if now_s < one.end_by_s and not all(link.done() for link in one.links):
            return
        with self.changed:
            self._sending.remove(one)
        one.closed.set_result(None)


def _turn(loop: SendLoop) -> bool:
    """Whether the loop goes on."""
    try:
        loop.turn()
    except Exception:  # noqa: BLE001 - one loop's bug must not end the others
        _log.exception("a sender met a bug and sends no more")
        return False
    return not loop.over


def _wait_s(one: _Sending, now_s: float) -> float:
    """Seconds until a loop has something to do, if nothing comes in."""
    return float("inf") if one.end_by_s else one.loop.wait_s(now_s)
