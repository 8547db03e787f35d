"""What other threads leave for a sender's thread, and what they may ask about it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from headrace_common.errors import Draining, DuplicateTransfer, QueueFull

Command = tuple[Callable[..., None], tuple[Any, ...]]


class SenderInbox:
    """Commands in order, the open transfers, and the pieces that wait. Every method may be called from any thread.

    `changed` is notified of each command; its lock may guard other inboxes too.
    """

    def __init__(self, transfer_limit: int, piece_limit: int, changed: threading.Condition) -> None:
        self._transfer_limit = transfer_limit
        self._piece_limit = piece_limit
        self._changed = changed
        self._commands: deque[Command] = deque()
        self._active: set[str] = set()
        self._overflowed: set[str] = set()
        self._pieces_waiting = 0
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether the last command from outside has come."""
        return self._closed

    @property
    def closed_and_empty(self) -> bool:
        """Whether nothing more will come."""
        with self._changed:
            return self._closed and not self._commands

    @property
    def has_commands(self) -> bool:
        """Whether something came that was not taken yet."""
        return bool(self._commands)

    def post(self, method: Callable[..., None], *arguments: Any) -> None:
        """Has the sender's thread call `method`."""
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

    def admit_piece(self, transfer_id: str, method: Callable[..., None], piece: Any) -> bool:
        """Posts a piece, unless its transfer is over. False, once for a transfer, when too many wait already."""
        with self._changed:
            if transfer_id not in self._active or transfer_id in self._overflowed:
                return True
            if self._pieces_waiting >= self._piece_limit:
                self._overflowed.add(transfer_id)
                return False
            self._pieces_waiting += 1
            self._post(method, (piece,))
            return True

    def close(self, method: Callable[..., None]) -> None:
        """Posts the last command from outside; later calls do nothing."""
        with self._changed:
            if not self._closed:
                self._closed = True
                self._post(method, ())

    def take(self) -> list[Command]:
        """The commands that are there."""
        with self._changed:
            commands = list(self._commands)
            self._commands.clear()
            return commands

    def forget_pieces(self, count: int) -> None:
        """So many pieces wait no more."""
        with self._changed:
            self._pieces_waiting -= count

    def forget(self, transfer_id: str) -> None:
        """The transfer is quiet."""
        with self._changed:
            self._active.discard(transfer_id)
            self._overflowed.discard(transfer_id)

    def active(self) -> frozenset[str]:
        """The transfers that are not quiet yet."""
        with self._changed:
            return frozenset(self._active)

    def is_active(self, transfer_id: str) -> bool:
        """Whether a transfer is open and not quiet yet."""
        with self._changed:
            return transfer_id in self._active

    def _post(self, method: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        self._commands.append((method, arguments))
        self._changed.notify()
