"""A channel that takes a new certificate into use."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from headrace_common.access.tls import TlsIdentity
from headrace_common.rpc.channel import ServiceChannel


class Call:
    """A call in progress until `end`."""

    def __init__(self, certificate: bytes) -> None:
        self.certificate = certificate
        self._on_done: list[Callable[[Any], None]] = []

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._on_done.append(callback)

    def end(self) -> None:
        for callback in self._on_done:
            callback(self)


class Channel:
    """Starts calls with its certificate."""

    def __init__(self, identity: TlsIdentity) -> None:
        self._certificate = identity.certificate
        self.closed = asyncio.Event()

    def unary_unary(self, method: str) -> Callable[..., Call]:
        return lambda **options: Call(self._certificate)

    async def close(self, grace: float | None = None) -> None:
        self.closed.set()


class Renewed:
    """A channel with a certificate that `present` changes."""

    def __init__(self) -> None:
        self.opened: list[Channel] = []
        self.present(b"old")
        self.channel = ServiceChannel(lambda: self._identity, self._connect)
        self.start = self.channel.unary_unary("/service/Method")

    def present(self, certificate: bytes) -> None:
        self._identity = TlsIdentity(certificate, b"key", b"authority")

    def _connect(self, identity: TlsIdentity | None) -> Any:
        assert identity is not None
        self.opened.append(Channel(identity))
        return self.opened[-1]


async def test_a_replaced_channel_is_closed_after_its_last_call() -> None:
    it = Renewed()
    first, second = it.start(), it.start()
    it.present(b"new")
    assert it.start().certificate == b"new"
    old = it.opened[0]
    first.end()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(old.closed.wait(), 0.05)
    second.end()
    await asyncio.wait_for(old.closed.wait(), 5)
    assert not it.opened[1].closed.is_set()


async def test_equal_contents_keep_the_channel() -> None:
    it = Renewed()
    it.present(b"old")
    assert it.start().certificate == b"old"
    assert len(it.opened) == 1
