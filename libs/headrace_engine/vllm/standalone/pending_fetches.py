"""Where a prompt to be sent and the engine that fetches it find each other, whoever comes first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

from headrace_common.deadlines import Deadline
from headrace_common.errors import DuplicateTransfer, NotFound, QueueFull
from headrace_kv.handoff.messages import TransferTarget


@dataclass(frozen=True, slots=True)
class Offer:
    """Somebody has blocks for a prompt's KV cache."""

    target: TransferTarget
    prompt_digest: int


class PendingFetches:
    """At most `limit` offers that no prompt has met. Every method may be called from any thread.

    The ids of the last `remembered` transfers that met or ended are refused when they come again.
    """

    def __init__(self, limit: int = 1024, remembered: int = 4096) -> None:
        self._limit = limit
        self._remembered = remembered
        self._lock = threading.Lock()
        self._waiting: dict[str, Offer] = {}
        self._over: OrderedDict[str, str] = OrderedDict()

    def offer(self, offer: Offer) -> None:
        """Raises NotFound when the prompt has been given up, DuplicateTransfer for a used id, or QueueFull."""
        transfer_id = offer.target.transfer_id
        with self._lock:
            if transfer_id in self._over:
                raise NotFound(
                    f"transfer {transfer_id} is over here: {self._over[transfer_id]}",
                    metadata={"transfer_id": transfer_id},
                )
            if transfer_id in self._waiting:
                raise DuplicateTransfer(
                    f"transfer {transfer_id} is being fetched already",
                    metadata={"transfer_id": transfer_id},
                )
            if len(self._waiting) >= self._limit:
                raise QueueFull(f"{self._limit} transfers wait for their prompts already")
            self._waiting[transfer_id] = offer

    def take(self, transfer_id: str) -> Offer | None:
        """The offer for a prompt, given out once."""
        with self._lock:
            offer = self._waiting.pop(transfer_id, None)
            if offer is not None:
                self._remember(transfer_id, "it has been fetched")
            return offer

    def end(self, transfer_id: str, why: str) -> bool:
        """No offer and no prompt is to meet any more. Whether an offer was waiting."""
        with self._lock:
            waited = self._waiting.pop(transfer_id, None) is not None
            self._remember(transfer_id, why)
            return waited

    def why_over(self, transfer_id: str) -> str:
        """Why a transfer is over; empty when it is not."""
        with self._lock:
            return self._over.get(transfer_id, "")

    def expired(self, deadline: Deadline, transfer_id: str) -> bool:
        """Whether a prompt has waited in vain; its transfer is over then."""
        if not deadline.expired:
            return False
        self.end(transfer_id, "its deadline has passed")
        return True

    def _remember(self, transfer_id: str, why: str) -> None:
        self._over.setdefault(transfer_id, why)
        while len(self._over) > self._remembered:
            self._over.popitem(last=False)
