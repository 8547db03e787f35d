"""The thread of send loops ends a loop once its streams have ended, or took too long to."""

from __future__ import annotations

import concurrent.futures
import threading
from typing import cast

import pytest

from headrace_kv.send import sender as thread_module
from headrace_kv.send.sender import SenderThread, SendLoop


class PolledFuture(concurrent.futures.Future[None]):
    """Counts the looks at it."""

    def __init__(self) -> None:
        super().__init__()
        self.polled = threading.Semaphore(0)

    def done(self) -> bool:
        self.polled.release()
        return super().done()


class ClosedLoop:
    """A send loop that is over at its first turn, with one stream that has not ended."""

    over = True
    has_records = False

    def __init__(self) -> None:
        self.stream_ended = PolledFuture()
        self.turns = 0

    def turn(self) -> None:
        self.turns += 1

    def wait_s(self) -> float:
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
    # The thread is real: the test waits until it has looked several times.
    for _ in range(3):
        assert loop.stream_ended.polled.acquire(timeout=20)
    assert not closed.done()
    loop.stream_ended.set_result(None)
    closed.result(20.0)
    assert loop.turns == 1


def test_a_loop_ends_without_a_stream_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_module, "_STREAMS_END_S", 0.01)
    loop = ClosedLoop()
    run(loop).result(20.0)
    assert not loop.stream_ended.done()
