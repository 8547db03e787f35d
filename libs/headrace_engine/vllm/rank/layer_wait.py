"""Makes a rank's forward pass wait for layers of overlapped requests that have not arrived yet."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from headrace_common.errors import TransferFailed
from headrace_engine.vllm.step.plan import OverlappedLoad

log = logging.getLogger(__name__)

KNOWN_TRANSFERS_MAX = 4096
FAILED = -1


class LayerWait:
    """Any thread may call `layers_arrived`. The rank's compute thread calls the rest, and `before_attention` blocks it.

    The forward pass writes a layer's new token into a block before the layer's hook is called. A write from prefill
    covers the whole block and would overwrite that token. So the hook of a layer waits for the next layer too. The
    first layer has always arrived before a request runs.
    `fence` orders the kernels queued after it behind the peers' writes, see DeviceOrder.
    """

    def __init__(self, layer_count: int, wait_s: float, fence: Callable[[], None]) -> None:
        """`wait_s`: the longest that one step waits."""
        self._layer_count = layer_count
        self._wait_s = wait_s
        self._fence = fence
        self._changed = threading.Condition()
        self._arrived: OrderedDict[str, int] = OrderedDict()
        self._awaited: dict[str, OverlappedLoad] = {}
        self._invalid: set[int] = set()
        self._wait_end_s: float | None = None

    def layers_arrived(self, transfer_id: str, layer_count: int, *, failed: bool) -> None:
        """The first `layer_count` layers have arrived. When `failed`, no more will arrive."""
        with self._changed:
            known = self._arrived.get(transfer_id, 0)
            if known != FAILED and known < self._layer_count:
                self._arrived[transfer_id] = FAILED if failed else max(known, layer_count)
            while len(self._arrived) > KNOWN_TRANSFERS_MAX:
                self._arrived.popitem(last=False)
            self._changed.notify_all()

    def begin_step(self, loads: Iterable[OverlappedLoad]) -> None:
        """Before the forward pass."""
        self._wait_end_s = None
        self._awaited.clear()
        running: list[OverlappedLoad] = []
        for load in loads:
            if load.lost:
                self._invalid.update(load.block_ids)
                continue
            running.append(load)
            if self._arrived.get(load.transfer_id, 0) < self._layer_count:
                self._awaited[load.transfer_id] = load
        self._fence_arrived(running)

    def before_attention(self, layer: int) -> None:
        """Returns once the layer and the next one may be read and written, or their transfers are abandoned."""
        if not self._awaited:
            return
        needed = min(layer + 2, self._layer_count)
        with self._changed:
            while True:
                self._abandon_failed()
                missing = [load for load in self._awaited.values() if not self._has(load, needed)]
                if not missing:
                    break
                if not self._wait(missing):
                    self._abandon_expired(missing)
        self._fence_arrived(list(self._awaited.values()))
        for load in list(self._awaited.values()):
            if self._has(load, self._layer_count):
                del self._awaited[load.transfer_id]

    def _fence_arrived(self, loads: Sequence[OverlappedLoad]) -> None:
        if not loads:
            return
        try:
            self._fence()
        except TransferFailed as exc:
            log.error("KV that has arrived cannot be read: %s", exc)
            for load in loads:
                self._awaited[load.transfer_id] = load
                self._abandon(load.transfer_id)

    def _has(self, load: OverlappedLoad, layer_count: int) -> bool:
        return self._arrived.get(load.transfer_id, 0) >= layer_count

    def _abandon_failed(self) -> None:
        for transfer_id in [one for one in self._awaited if self._arrived.get(one) == FAILED]:
            self._abandon(transfer_id)

    def _wait(self, missing: Sequence[OverlappedLoad]) -> bool:
        """Waits for a change. False when the step, or one of the transfers, has no time left."""
        start_s = time.monotonic()
        if self._wait_end_s is None:
            self._wait_end_s = start_s + self._wait_s
        deadline_s = min(load.deadline_s for load in missing)
        left_s = min(self._wait_end_s, deadline_s) - start_s
        if left_s <= 0:
            return False
        self._changed.wait(left_s)
        return True

    def _abandon_expired(self, missing: Sequence[OverlappedLoad]) -> None:
        """Abandons the transfers that have no time left."""
        now_s = time.monotonic()
        left_s = (self._wait_end_s or 0.0) - now_s
        for load in missing:
            if left_s <= 0 or now_s >= load.deadline_s:
                log.warning(
                    "transfer %s is abandoned: a step waited %.3g s, and layer %d has not arrived",
                    load.transfer_id,
                    self._wait_s - max(0.0, left_s),
                    self._arrived.get(load.transfer_id, 0),
                )
                self._abandon(load.transfer_id)

    def _abandon(self, transfer_id: str) -> None:
        self._invalid.update(self._awaited.pop(transfer_id).block_ids)
        # If vLLM schedules the request again, no step waits for it a second time.
        self._arrived[transfer_id] = FAILED

    def end_step(self) -> None:
        """After the forward pass. What is still awaited was not read whole."""
        for transfer_id in list(self._awaited):
            self._abandon(transfer_id)

    def take_invalid_blocks(self) -> set[int]:
        """Blocks that the step has read although they were not whole. Forgets them."""
        taken, self._invalid = self._invalid, set()
        return taken
