"""A channel that takes a new certificate into use.

A channel of gRPC presents the certificate of its creation, also when it connects again years later. This one makes a
new channel of gRPC for the calls that start after a change. Calls in progress end on the channel that they began on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from headrace_common.access.tls import TlsIdentity


class RenewedChannel(grpc.aio.Channel):
    """`identity` returns the certificate in force, and `connect` makes a channel that presents one."""

    def __init__(
        self,
        identity: Callable[[], TlsIdentity],
        connect: Callable[[TlsIdentity], grpc.aio.Channel],
    ) -> None:
        self._identity = identity
        self._connect = connect
        self._used = identity()
        self._current = _CountedChannel(connect(self._used))
        self._replaced: dict[_CountedChannel, asyncio.Task[None]] = {}
        self._closed = False

    async def __aenter__(self) -> RenewedChannel:
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        self._closed = True
        waits = list(self._replaced.values())
        for task in waits:
            task.cancel()
        channels = [counted.channel for counted in (*self._replaced, self._current)]
        await asyncio.gather(*(channel.close(grace) for channel in channels))
        await asyncio.gather(*waits, return_exceptions=True)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._current.channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._current.channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._renewed().channel.channel_ready()

    def unary_unary(self, *arguments: Any, **options: Any) -> Any:
        return self._starter("unary_unary", arguments, options)

    def unary_stream(self, *arguments: Any, **options: Any) -> Any:
        return self._starter("unary_stream", arguments, options)

    def stream_unary(self, *arguments: Any, **options: Any) -> Any:
        return self._starter("stream_unary", arguments, options)

    def stream_stream(self, *arguments: Any, **options: Any) -> Any:
        return self._starter("stream_stream", arguments, options)

    def _starter(
        self, kind: str, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> Callable[..., Any]:
        counted = self._current
        start_call = getattr(counted.channel, kind)(*arguments, **options)

        def start(*call_arguments: Any, **call_options: Any) -> Any:
            nonlocal counted, start_call
            current = self._renewed()
            if current is not counted:
                counted = current
                start_call = getattr(current.channel, kind)(*arguments, **options)
            return counted.count(start_call(*call_arguments, **call_options))

        return start

    def _renewed(self) -> _CountedChannel:
        """The channel for the next call."""
        identity = self._identity()
        if identity is not self._used and not self._closed:
            if identity != self._used:
                old = self._current
                self._current = _CountedChannel(self._connect(identity))
                self._replaced[old] = asyncio.create_task(self._close_when_unused(old))
            self._used = identity
        return self._current

    async def _close_when_unused(self, counted: _CountedChannel) -> None:
        await counted.wait_unused()
        await counted.channel.close()
        del self._replaced[counted]


class _CountedChannel:
    """A channel and the number of its calls in progress."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self._calls = 0
        self._unused = asyncio.Event()
        self._unused.set()

    def count(self, call: Any) -> Any:
        self._calls += 1
        self._unused.clear()
        call.add_done_callback(self._end)
        return call

    async def wait_unused(self) -> None:
        await self._unused.wait()

    def _end(self, call: Any) -> None:
        self._calls -= 1
        if not self._calls:
            self._unused.set()
