"""Requests that are answered in the background: their answer goes to the store, from which clients read it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Final

from headrace_common.http.exchange import HttpExchange
from headrace_frontend.openai.block_apis.stored import StoredObject

_STATES: Final = ("in_progress", "completed", "incomplete", "failed")
_STATE_EVENTS: Final = tuple(f"event: response.{state}" for state in _STATES)


class NoConnection:
    """A client of this process, in place of a connection: see Client."""

    peer_names: tuple[bytes, ...] = ()
    write_paused = False

    def __init__(self, caller: str) -> None:
        self.caller = caller

    def write(self, data: bytes) -> None:
        """See Client."""

    async def until_writable(self) -> None:
        """See Client."""

    def end_response(self, data: bytes, *, keeps_alive: bool) -> None:
        """See Client."""

    def count_input(self) -> None:
        """See Client."""


class BackgroundClient(NoConnection):
    """Reads the event stream of a response. `on_change` follows each change."""

    def __init__(
        self, entry: StoredObject, asked: HttpExchange, on_change: Callable[[], None]
    ) -> None:
        """`asked` is the request that created the response."""
        super().__init__(asked.host)
        self._entry, self._on_change = entry, on_change
        self.exchange = HttpExchange(
            self, asked.method, asked.path, asked.headers, chunks=False, keeps_alive=True
        )
        """The request, with this client."""
        # So that each error becomes an event.
        self.exchange.write_now(b"")
        entry.run_until(self.exchange.disconnect)

    def write(self, data: bytes) -> None:
        """See Client. Comments and the head of the response are left out."""
        if self._entry.ended:
            return
        for event in data.decode().split("\n\n"):
            name, _, content = event.partition("\ndata: ")
            if name in _STATE_EVENTS:
                self._entry.set_value(json.loads(content)["response"])
            elif name == "event: error":
                found = json.loads(content)
                error = {"code": found["code"], "message": found["message"]}
                self._entry.change({"status": "failed", "error": error})
            if name.startswith("event: "):
                self._entry.record(event)
        self._on_change()

    def end_response(self, data: bytes, *, keeps_alive: bool) -> None:
        """See Client."""
        self.write(data)
        self._entry.close()
