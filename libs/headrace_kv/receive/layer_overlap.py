"""Says how far a transfer has come to an engine that begins before its last layers are there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from headrace_common.deadlines import Deadline
from headrace_common.errors import ConfigError
from headrace_kv.receive.transfer import IncomingTransfer


@dataclass(frozen=True, slots=True)
class OverlapSettings:
    """The most layers, the last ones, that may be missing when a request begins, none by default.

    `wait_s`: the longest that one forward pass waits for them.
    """

    layer_count: int = 0
    wait_s: float = 0.5

    def check(self, model_layer_count: int) -> None:
        """Raises ConfigError for more than there may be of so many layers: the first must be there."""
        if self.layer_count >= model_layer_count:
            raise ConfigError(
                f"overlap_layers is {self.layer_count}, but the model has {model_layer_count} layers: "
                f"choose {model_layer_count - 1} or less",
                metadata={"field": "overlap_layers"},
            )


class LayerArrivalListener(Protocol):
    """Where it is said. Nothing here blocks."""

    def arriving(self, transfer_id: str, deadline: Deadline) -> None:
        """On every rank, all but the last layers are there: the request may begin."""

    def layers_arrived(
        self, transfer_id: str, rank: int, layer_count: int, *, failed: bool
    ) -> None:
        """The first so many layers are whole on a rank; no more will come when the transfer has failed."""


class LayerOverlap:
    """Follows one transfer. `advance` is for Receiver.reserve's `on_advance`.

    Says nothing of a transfer that becomes whole, or fails, before its request could have begun early.
    """

    def __init__(
        self, news: LayerArrivalListener, *, overlap_layers: int, layer_count: int, rank_count: int
    ):
        self._news = news
        self._enough_layers = layer_count - overlap_layers
        self._told = dict.fromkeys(range(rank_count), 0)
        self._begun = False

    def advance(self, transfer: IncomingTransfer) -> None:
        """Something has landed, or the transfer has ended."""
        if transfer.ledger is None:
            return
        failed = transfer.error is not None
        if not self._begun and not (transfer.active and self._enough(transfer)):
            return
        for rank, told in self._told.items():
            layer_count = told if failed else transfer.ledger.arrived_layers(rank)
            if failed or layer_count > told:
                self._told[rank] = layer_count
                self._news.layers_arrived(transfer.transfer_id, rank, layer_count, failed=failed)
        if not self._begun:
            self._begun = True
            self._news.arriving(transfer.transfer_id, transfer.deadline)

    def _enough(self, transfer: IncomingTransfer) -> bool:
        ledger = transfer.ledger
        return ledger is not None and all(
            ledger.arrived_layers(rank) >= self._enough_layers for rank in self._told
        )
