"""Matches prompts to be sent with the Fetch calls for them, whichever comes first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

from headrace_common.deadlines import Deadline
from headrace_common.errors import DuplicateTransfer, NotFound, QueueFull
from headrace_kv.handoff.messages import TransferTarget


@dataclass(frozen=True, slots=True)
class PendingFetch:
    """A decode engine has reserved blocks, `target`, for the KV cache of the prompt with this digest."""

    target: TransferTarget
    prompt_digest: int


class PendingFetches:
    """Holds at most `limit` fetches without a prompt. Any thread may call its methods.

    The ids of the last `remembered` transfers that were matched or closed are rejected when they come again.
    """

    def __init__(self, limit: int = 1024, remembered: int = 4096) -> None:
        self._limit = limit
        self._remembered = remembered
        self._lock = threading.Lock()
        self._pending: dict[str, PendingFetch] = {}
        self._closed: OrderedDict[str, str] = OrderedDict()

    def add(self, fetch: PendingFetch) -> None:
        """Raises NotFound when the transfer is closed, DuplicateTransfer when it is pending, or QueueFull."""
        transfer_id = fetch.target.transfer_id
        with self._lock:
            if transfer_id in self._closed:
                raise NotFound(
                    f"transfer {transfer_id} is over here: {self._closed[transfer_id]}",
                    metadata={"transfer_id": transfer_id},
                )
            if transfer_id in self._pending:
                raise DuplicateTransfer(
                    f"transfer {transfer_id} is being fetched already",
                    metadata={"transfer_id": transfer_id},
                )
            if len(self._pending) >= self._limit:
                raise QueueFull(f"{self._limit} transfers wait for their prompts already")
            self._pending[transfer_id] = fetch

    def match(self, transfer_id: str) -> PendingFetch | None:
        """Removes and returns the fetch for a prompt, and closes its transfer. None while there is none."""
        with self._lock:
            fetch = self._pending.pop(transfer_id, None)
            if fetch is not None:
                self._remember(transfer_id, "it has been fetched")
            return fetch

    def close(self, transfer_id: str, why: str) -> None:
        """From now on, no fetch and no prompt match under this id."""
        with self._lock:
            self._pending.pop(transfer_id, None)
            self._remember(transfer_id, why)

    def close_reason(self, transfer_id: str) -> str:
        """Why a transfer is closed. Empty when it is not."""
        with self._lock:
            return self._closed.get(transfer_id, "")

    def close_expired(self, transfer_id: str, deadline: Deadline) -> str:
        """Closes a transfer after its deadline. Returns why it is closed, empty when it is not."""
        if deadline.expired:
            self.close(transfer_id, "its deadline has passed")
        return self.close_reason(transfer_id)

    def _remember(self, transfer_id: str, why: str) -> None:
        self._closed.setdefault(transfer_id, why)
        while len(self._closed) > self._remembered:
            self._closed.popitem(last=False)
