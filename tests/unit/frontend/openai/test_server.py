"""The writes of one HTTP response."""

from __future__ import annotations

from types import SimpleNamespace

from headrace_frontend.openai.direct import JoinedHead


class _Transport:
    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        self.writes.append(data)

    def close(self) -> None:
        self.closed = True


def test_the_head_is_sent_with_the_first_part_of_the_body() -> None:
    transport = _Transport()
    cycle = SimpleNamespace(transport=transport, response_started=False)
    cycle.transport = joined = JoinedHead(cycle)
    joined.write(b"100 Continue")
    assert transport.writes == [b"100 Continue"], "it is no head, and the client waits for it"
    cycle.response_started = True
    joined.write(b"head ")
    assert transport.writes[1:] == []
    joined.write(b"first")
    assert cycle.transport is transport, "the cycle and the object refer to each other no more"
    joined.write(b"second")
    assert transport.writes[1:] == [b"head first", b"second"]


def test_a_head_without_a_body_is_sent_before_the_end() -> None:
    transport = _Transport()
    joined = JoinedHead(SimpleNamespace(transport=transport, response_started=True))
    joined.write(b"head")
    joined.close()
    assert transport.writes == [b"head"]
    assert transport.closed
