"""The thread of send loops ends a loop once its streams have ended, or took too long to."""

from __future__ import annotations

import concurrent.futures
from typing import cast

import pytest

from headrace_kv.send import thread as thread_module
from headrace_kv.send.loop import SendLoop
from headrace_kv.send.thread import SenderThread


class ClosedLoop:
    """A send loop that is over at its first turn, with one stream that has not ended."""

    over = True

    def __init__(self) -> None:
        self.stream_ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.turns = 0

    def turn(self) -> None:
        self.turns += 1

    def wait_s(self, now_s: float) -> float:
        return 0.0

    def close_streams(self) -> tuple[concurrent.futures.Future[None], ...]:
        return (self.stream_ended,)


def run(loop: ClosedLoop) -> concurrent.futures.Future[None]:
    closed: concurrent.futures.Future[None] = concurrent.futures.Future()
    SenderThread("test-sender").add(cast("SendLoop", loop), closed)
    return closed


def test_a_loop_ends_with_its_streams() -> None:
    loop = ClosedLoop()
    closed = run(loop)
    with pytest.raises(TimeoutError):
        closed.result(0.3)
    loop.stream_ended.set_result(None)
    closed.result(10.0)
    assert loop.turns == 1


def test_a_loop_ends_without_a_stream_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_module, "_STREAMS_END_S", 0.2)
    loop = ClosedLoop()
    run(loop).result(10.0)
    assert not loop.stream_ended.done()
