"""The thread of send loops ends a loop once its streams have ended, or took too long to."""

from __future__ import annotations

import concurrent.futures
import threading
from typing import Any, cast

import pytest

from headrace_kv.layout import WorkerRef
from headrace_kv.messages import TransferTarget
from headrace_kv.send import sender as sender_module
from headrace_kv.send.sender import RankSender
from headrace_kv.send.stream import HandoffStream, SenderContext
from tests.in_memory_transport import InMemoryTransport
from tests.unit.kv.send.test_sender import LAYOUT, memory_of, no_descriptor

WAIT_S = 20.0
"""The thread is real, and so are the waits. They end with the awaited event."""


class PolledFuture(concurrent.futures.Future[None]):
    """Counts the looks at it."""

    def __init__(self) -> None:
        super().__init__()
        self.polled = threading.Semaphore(0)

    def done(self) -> bool:
        self.polled.release()
        return super().done()


class EndlessStream(HandoffStream):
    """Ends when the test says so."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.ended: PolledFuture = PolledFuture()

    def start(self) -> None:
        pass

    def close(self) -> None:
        pass


def closed_sender() -> tuple[RankSender, EndlessStream]:
    """A sender that was closed with a transfer to one decode worker."""
    streams: list[EndlessStream] = []

    def make_stream(*arguments: Any) -> EndlessStream:
        streams.append(EndlessStream(*arguments))
        return streams[-1]

    quiet = threading.Event()
    context = SenderContext(
        ref=WorkerRef("prefill-0", "1"),
        rank=0,
        layout=LAYOUT,
        memory=memory_of("prefill"),
        transport=InMemoryTransport(),
        descriptors=no_descriptor,
        event_loop=cast("Any", None),
        on_quiet=lambda report: quiet.set(),
    )
    sender = RankSender(context, make_stream=make_stream)
    sender.open(TransferTarget("a", WorkerRef("decode-0", "1"), "", 0, 4, 1e12))
    sender.close()
    assert quiet.wait(WAIT_S)
    return sender, streams[0]


def test_a_loop_ends_with_its_streams() -> None:
    sender, stream = closed_sender()
    for _ in range(3):
        assert stream.ended.polled.acquire(timeout=WAIT_S)
    assert not sender.closed.done()
    stream.ended.set_result(None)
    sender.closed.result(WAIT_S)


def test_a_loop_ends_without_a_stream_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender_module, "_STREAMS_END_S", 0.01)
    sender, stream = closed_sender()
    sender.closed.result(WAIT_S)
    assert not stream.ended.done()
