"""The server-sent events of one response."""

from __future__ import annotations

from typing import Final

from headrace.inference.v1 import inference_pb2
from headrace_frontend.openai.exchange import HttpExchange
from headrace_frontend.openai.responses import AnswerFormat

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

    def write_now(self, index: int, message: inference_pb2.GenerateResponse) -> bool:
        """Sends a message that is not the last one of its choice. See MessageOutlet."""
        exchange = self._exchange
        if not exchange.writable:
            return False
        data = self._event(index, message)
        if exchange.started:
            return not data or exchange.write_now(data)
        return exchange.start_now(_HEADERS, data)

    def write_text(self, index: int, text: str) -> bool:
        """Sends text after the first message of choice `index`. See TextOutlet."""
        data = self._form.text_event(index, text)
        return data is not None and self._exchange.write_now(data)

    async def finish(self) -> None:
        """Sends what is left, once all choices have ended."""
        exchange = self._exchange
        data = self._ending + self._form.last_event(self._usages, self._prompts)
        if not exchange.started:
            await exchange.start(200, _HEADERS)
        await exchange.finish(data)

    def _event(self, index: int, message: inference_pb2.GenerateResponse) -> bytes:
        if index in self._begun:
            return self._form.event(index, message)
        self._begun.add(index)
        return self._form.first_event(index) + self._form.event(index, message)
