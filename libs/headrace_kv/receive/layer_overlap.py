"""Reports arrived layers to an engine that overlaps its first step with the arrival of the last layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from headrace_common.deadlines import Deadline
from headrace_common.errors import ConfigError
from headrace_kv.receive.observer import TransferObserver, TransferView


@dataclass(frozen=True, slots=True)
class OverlapSettings:
    """`layer_count`: how many layers, the last ones, may be missing when a request starts; 0 turns the overlap off.

    `wait_s`: the longest that one forward pass waits for them.
    """

    layer_count: int = 0
    wait_s: float = 0.5

    def check(self, model_layer_count: int) -> None:
        """Raises ConfigError unless the first of `model_layer_count` layers must have arrived."""
        if self.layer_count >= model_layer_count:
            raise ConfigError(
                f"overlap_layers is {self.layer_count}, but the model has {model_layer_count} layers: "
                f"choose {model_layer_count - 1} or less",
                metadata={"field": "overlap_layers"},
            )


class LayerArrivalListener(Protocol):
    """Callbacks for layer arrival. They must not block."""

    def arriving(self, transfer_id: str, deadline: Deadline) -> None:
        """On every rank, all but the last layers have arrived: the request may start."""

    def layers_arrived(
        self, transfer_id: str, rank: int, layer_count: int, *, failed: bool
    ) -> None:
        """The first `layer_count` layers are whole on a rank. After a failure no more arrive."""


class LayerOverlap(TransferObserver):
    """Observes one transfer. Calls nothing when it completes or fails before its request could start early."""

    def __init__(
        self,
        listener: LayerArrivalListener,
        *,
        overlap_layers: int,
        layer_count: int,
        rank_count: int,
    ) -> None:
        self._listener = listener
        self._required_layers = layer_count - overlap_layers
        self._reported = dict.fromkeys(range(rank_count), 0)
        self._started = False

    def on_progress(self, transfer: TransferView) -> None:
        failed = transfer.error is not None
        if not self._started and not (transfer.active and self._may_start(transfer)):
            return
        for rank, reported in self._reported.items():
            layer_count = reported if failed else transfer.arrived_layers(rank)
            if failed or layer_count > reported:
                self._reported[rank] = layer_count
                self._listener.layers_arrived(
                    transfer.transfer_id, rank, layer_count, failed=failed
                )
        if not self._started:
            self._started = True
            self._listener.arriving(transfer.transfer_id, transfer.deadline)

    def _may_start(self, transfer: TransferView) -> bool:
        return all(
            transfer.arrived_layers(rank) >= self._required_layers for rank in self._reported
        )
