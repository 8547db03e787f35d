"""Which layers of incoming transfers are whole, for steps that compute while others are on their way."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from headrace_common.tasks import Recent

log = logging.getLogger(__name__)

# The service ends such a transfer before, and then no layer is awaited.
WAIT_S = 60.0
_KNOWN_MAX = 1_024


class LayerArrivals:
    """Any thread may call `arrived`, and the thread that computes the steps all other methods."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._counts: Recent[str, int] = Recent(_KNOWN_MAX)
        self.awaited: Sequence[str] = ()
        """The transfers with layers that the step waits for."""

    def arrived(self, transfer_id: str, layer_count: int) -> None:
        """See LayersArrived."""
        with self._changed:
            self._counts[transfer_id] = max(layer_count, self._counts.get(transfer_id, 0))
            self._changed.notify_all()

    def begin_step(self, awaited: Sequence[str]) -> None:
        """The step reads KV of these transfers."""
        self.awaited = awaited

    def lacks(self, layer: int) -> bool:
        """Whether the step must wait before it reads the layer."""
        return any(self._counts.get(one, 0) <= layer for one in self.awaited)

    def wait(self, layer: int) -> None:
        """Blocks while the step must wait before it reads the layer."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self.lacks(layer), WAIT_S):
                # No token of the step is used: its transfers are not complete (I3).
                log.error("layer %d of %s did not arrive in %g s", layer, self.awaited, WAIT_S)
