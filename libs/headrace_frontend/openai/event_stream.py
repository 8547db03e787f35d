"""A response as server-sent events: when it starts, what it gets while it is silent, and how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from headrace.inference.v1 import inference_pb2
from headrace_common.http.exchange import HttpExchange
from headrace_frontend.openai.responses import AnswerFormat
from headrace_frontend.request.response_stream import Outlet

_HEADERS: Final = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    # Proxies such as nginx would collect events.
    "x-accel-buffering": "no",
}


class EventStream:
    """Sends an event for each message of each choice. `prompts` share the choices evenly."""

    def __init__(
        self, exchange: HttpExchange, form: AnswerFormat, *, choices: int, prompts: int
    ) -> None:
        self._exchange = exchange
        self._form = form
        self._prompts = prompts
        self._usages = [inference_pb2.Usage() for _ in range(choices)]
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
        exchange = self._exchange
        if exchange.parts == self._parts and exchange.writable:
            data = self._begin(0) + self._form.ping
            if not exchange.start_now(_HEADERS, data):
                exchange.write_now(data)
        self._parts = exchange.parts
        self.ping_each(interval_s)

    def close(self) -> None:
        """Ends the pings."""
        if self._timer is not None:
            self._timer.cancel()

    async def write(self, index: int, message: inference_pb2.GenerateResponse) -> None:
        """Sends a message of choice `index`. Waits while the client does not read."""
        data = self._event(index, message)
        if message.finish_reason:
            self._usages[index] = message.usage
            if len(self._usages) == 1:
                # One write for all that is left.
                self._ending = data
                return
        if not self._exchange.started:
            await self._exchange.start(200, _HEADERS)
        if data:
            await self._exchange.write(data)

    def outlet(self, index: int) -> Outlet:
        """Sends messages of choice `index` at once."""
        return _ChoiceOutlet(index, self._exchange, self._form, self._event)

    async def finish(self) -> None:
        """Sends what is left, once all choices have ended."""
        exchange = self._exchange
        data = self._ending + self._form.last_event(self._usages, self._prompts)
        if not exchange.started:
            await exchange.start(200, _HEADERS)
        await exchange.finish(data)

    def _event(self, index: int, message: inference_pb2.GenerateResponse) -> bytes:
        return self._begin(index) + self._form.event(index, message)

    def _begin(self, index: int) -> bytes:
        if index in self._begun:
            return b""
        self._begun.add(index)
        return self._form.first_event(index)


@dataclass(frozen=True, slots=True)
class _ChoiceOutlet:
    """Sends one choice of an event stream at once. See Outlet."""

    index: int
    exchange: HttpExchange
    form: AnswerFormat
    event: Callable[[int, inference_pb2.GenerateResponse], bytes]

    @property
    def writable(self) -> bool:
        return self.exchange.writable

    def write_message(self, message: inference_pb2.GenerateResponse) -> None:
        data = self.event(self.index, message)
        if not self.exchange.started:
            self.exchange.start_now(_HEADERS, data)
        elif data:
            self.exchange.write_now(data)

    def write_text(self, text: str) -> bool:
        if not self.exchange.writable:
            return False
        data = self.form.text_event(self.index, text)
        if data is None:
            return False
        # Tokens without text are a part of a character.
        if text:
            self.exchange.write_now(data)
        return True
