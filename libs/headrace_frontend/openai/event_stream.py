"""A response as server-sent events: when it starts, what it gets while it is silent, and how it ends."""

from __future__ import annotations

import asyncio
from typing import Final

from headrace.inference.v1 import inference_pb2
from headrace_common.http.exchange import HttpExchange
from headrace_frontend.openai.responses import AnswerFormat
from headrace_frontend.request.response_stream import Outlet

_NO_USAGE: Final = inference_pb2.Usage()
STREAM_HEADERS: Final = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    # Proxies such as nginx would collect events.
    "x-accel-buffering": "no",
}


class EventStream(Outlet):
    """Sends an event for each message of each choice. `prompts` share the choices evenly.

    It is the outlet of a single choice.
    """

    def __init__(
        self, exchange: HttpExchange, form: AnswerFormat, *, choices: int, prompts: int
    ) -> None:
        self.exchange = exchange
        self.form = form
        self._prompts = prompts
        self._usages = [_NO_USAGE] * choices
        self._begun: set[int] = set()
        """The choices with an event."""
        self._ending = b""
        self._parts = 0
        """Of the response, when the client was last found to get some."""
        self._timer: asyncio.TimerHandle | None = None

    def ping_each(self, interval_s: float) -> None:
        """Sends a ping after each interval without an event. Proxies and clients end connections that are silent.

        Until then, an error before the first event has its own HTTP status. 0: never.
        """
        if interval_s:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(interval_s, self._ping, interval_s)

    def _ping(self, interval_s: float) -> None:
        exchange = self.exchange
        if exchange.parts == self._parts and exchange.writable:
            exchange.write_now(self._begin(0) + self.form.ping, STREAM_HEADERS)
        self._parts = exchange.parts
        self.ping_each(interval_s)

    def close(self) -> None:
        """Ends the pings."""
        if self._timer is not None:
            self._timer.cancel()

    async def write(self, index: int, message: inference_pb2.GenerateResponse) -> None:
        """Sends a message of choice `index`. Waits while the client does not read."""
        data = self.event(index, message)
        if message.finish_reason:
            self._usages[index] = message.usage
            if len(self._usages) == 1:
                # One write for all that is left.
                self._ending = data
                return
        if data or not self.exchange.started:
            await self.exchange.write(data, STREAM_HEADERS)

    async def finish(self) -> None:
        """Sends what is left, once all choices have ended."""
        data = self._ending + self.form.last_event(self._usages, self._prompts)
        await self.form.stored()
        await self.exchange.finish(data, STREAM_HEADERS)

    def event(self, index: int, message: inference_pb2.GenerateResponse) -> bytes:
        """The events for a message of choice `index`."""
        return self._begin(index) + self.form.event(index, message)

    def _begin(self, index: int) -> bytes:
        if index in self._begun:
            return b""
        self._begun.add(index)
        return self.form.first_event(index)

    @property
    def writable(self) -> bool:
        return self.exchange.writable

    def write_message(self, message: inference_pb2.GenerateResponse) -> None:
        data = self.event(0, message)
        if data or not self.exchange.started:
            self.exchange.write_now(data, STREAM_HEADERS)

    def write_text(self, text: str) -> bool:
        # A format remembers the texts of its events.
        data = self.form.text_event(0, text) if self.exchange.writable else None
        # Tokens without text are a part of a character.
        if data is not None and text:
            self.exchange.write_now(data)
        return data is not None
