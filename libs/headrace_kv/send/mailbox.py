"""The commands from other threads to a sender's thread, with their bounds."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from headrace_common.errors import Draining, DuplicateTransfer, QueueFull
from headrace_kv.messages import LayerRange

Command = tuple[Callable[..., None], tuple[Any, ...]]


class SenderInbox:
    """Commands in order, the ids of open transfers, and the count of waiting layer ranges.

    Every method may be called from any thread. `changed` is notified of each command. Several inboxes may share it.
    """

    def __init__(
        self, transfer_limit: int, waiting_range_limit: int, changed: threading.Condition
    ) -> None:
        self._transfer_limit = transfer_limit
        self._waiting_range_limit = waiting_range_limit
        self._changed = changed
        self._commands: deque[Command] = deque()
        self._active: set[str] = set()
        self._overflowed: set[str] = set()
        self._waiting_range_count = 0
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def closed_and_empty(self) -> bool:
        """Whether `close` was called and every command was drained."""
        with self._changed:
            return self._closed and not self._commands

    @property
    def has_commands(self) -> bool:
        """Whether commands wait to be drained."""
        return bool(self._commands)

    def post(self, method: Callable[..., None], *arguments: Any) -> None:
        """Queues a call of `method` on the sender's thread."""
        with self._changed:
            self._post(method, arguments)

    def admit(self, transfer_id: str, method: Callable[..., None], *arguments: Any) -> None:
        """Posts the opening of a transfer. Raises Draining, DuplicateTransfer or QueueFull."""
        with self._changed:
            if self._closed:
                raise Draining("the sender is closing")
            if transfer_id in self._active:
                raise DuplicateTransfer(
                    f"transfer {transfer_id} is open already", metadata={"transfer_id": transfer_id}
                )
            if len(self._active) >= self._transfer_limit:
                raise QueueFull(
                    f"the sender has {self._transfer_limit} transfers already",
                    metadata={"transfers": str(self._transfer_limit)},
                )
            self._active.add(transfer_id)
            self._post(method, arguments)

    def admit_range(
        self, transfer_id: str, method: Callable[..., None], layer_range: LayerRange
    ) -> bool:
        """Posts a layer range, unless its transfer is over.

        False when too many ranges wait. A transfer gets False once; its later ranges are dropped.
        """
        with self._changed:
            if transfer_id not in self._active or transfer_id in self._overflowed:
                return True
            if self._waiting_range_count >= self._waiting_range_limit:
                self._overflowed.add(transfer_id)
                return False
            self._waiting_range_count += 1
            self._post(method, (layer_range,))
            return True

    def close(self, method: Callable[..., None]) -> None:
        """Posts the last command and refuses new transfers. Later calls do nothing."""
        with self._changed:
            if not self._closed:
                self._closed = True
                self._post(method, ())

    def drain(self) -> list[Command]:
        """Removes and returns every waiting command."""
        with self._changed:
            commands = list(self._commands)
            self._commands.clear()
            return commands

    def ranges_removed(self, count: int) -> None:
        """`count` layer ranges were planned or dropped, and wait no more."""
        with self._changed:
            self._waiting_range_count -= count

    def transfer_quiet(self, transfer_id: str) -> None:
        """The transfer is quiet. Its id may be used again."""
        with self._changed:
            self._active.discard(transfer_id)
            self._overflowed.discard(transfer_id)

    def active_transfers(self) -> frozenset[str]:
        """The transfers that are not quiet yet."""
        with self._changed:
            return frozenset(self._active)

    def _post(self, method: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        self._commands.append((method, arguments))
        self._changed.notify()
