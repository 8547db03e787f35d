"""A rank's half of beginning early: the forward pass waits where a layer's KV is not there yet."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from headrace_common.errors import TransferFailed
from headrace_engine.vllm.step.plan import LateLoad

log = logging.getLogger(__name__)

HEARD_MAX = 4096
FAILED = -1


class LayerWait:
    """`heard` may be called on any thread, all else on the rank's compute thread, which `before_attention` blocks.

    A layer's new token is written into a block before the layer's hook is called, and what arrives are whole blocks,
    which would undo that. So a layer's hook waits for the next layer too; the first is there before a request begins.
    `fence` lets what is queued after it see what has arrived, see DeviceOrder.
    """

    def __init__(self, layer_count: int, wait_s: float) -> None:
        self._layer_count = layer_count
        self._wait_s = wait_s
        self._changed = threading.Condition()
        self._arrived: OrderedDict[str, int] = OrderedDict()
        self._awaited: dict[str, LateLoad] = {}
        self._invalid: set[int] = set()
        self._patience_end_s: float | None = None
        self.fence: Callable[[], None] = lambda: None

    def heard(self, transfer_id: str, layer_count: int, *, failed: bool) -> None:
        """So many layers, from the first one, are there; no more will come when it has failed."""
        with self._changed:
            known = self._arrived.get(transfer_id, 0)
            if known != FAILED and known < self._layer_count:
                self._arrived[transfer_id] = FAILED if failed else max(known, layer_count)
            while len(self._arrived) > HEARD_MAX:
                self._arrived.popitem(last=False)
            self._changed.notify_all()

    def begin_step(self, late: Iterable[LateLoad]) -> None:
        """Before the forward pass."""
        self._patience_end_s = None
        self._awaited.clear()
        begun: list[LateLoad] = []
        for load in late:
            if load.lost:
                self._invalid.update(load.block_ids)
                continue
            begun.append(load)
            if self._arrived.get(load.transfer_id, 0) < self._layer_count:
                self._awaited[load.transfer_id] = load
        self._see_arrived(begun)

    def before_attention(self, layer: int) -> None:
        """Returns once the layer and the next one may be used and written to, or what is late is given up."""
        if not self._awaited:
            return
        needed = min(layer + 2, self._layer_count)
        with self._changed:
            while True:
                self._drop_failed()
                lacking = [load for load in self._awaited.values() if not self._has(load, needed)]
                if not lacking:
                    break
                if not self._wait(lacking):
                    self._give_up(lacking)
        self._see_arrived(list(self._awaited.values()))
        for load in list(self._awaited.values()):
            if self._has(load, self._layer_count):
                del self._awaited[load.transfer_id]

    def _see_arrived(self, loads: Sequence[LateLoad]) -> None:
        if not loads:
            return
        try:
            self.fence()
        except TransferFailed as exc:
            log.error("what has arrived cannot be read: %s", exc)
            for load in loads:
                self._awaited[load.transfer_id] = load
                self._refuse(load.transfer_id)

    def _has(self, load: LateLoad, layer_count: int) -> bool:
        return self._arrived.get(load.transfer_id, 0) >= layer_count

    def _drop_failed(self) -> None:
        for transfer_id in [one for one in self._awaited if self._arrived.get(one) == FAILED]:
            self._refuse(transfer_id)

    def _wait(self, lacking: Sequence[LateLoad]) -> bool:
        """False when there is no time left, of the step or of one that lacks a layer."""
        start_s = time.monotonic()
        if self._patience_end_s is None:
            self._patience_end_s = start_s + self._wait_s
        deadline_unix_s = min(load.deadline_unix_s for load in lacking)
        left_s = min(self._patience_end_s - start_s, deadline_unix_s - time.time())
        if left_s <= 0:
            return False
        self._changed.wait(left_s)
        return True

    def _give_up(self, lacking: Sequence[LateLoad]) -> None:
        """Those whose time is up."""
        now_s = time.time()
        patience_s = (self._patience_end_s or 0.0) - time.monotonic()
        for load in lacking:
            if patience_s <= 0 or now_s >= load.deadline_unix_s:
                log.warning(
                    "transfer %s is given up: a step waited %.3g s, and layer %d has not come",
                    load.transfer_id,
                    self._wait_s - max(0.0, patience_s),
                    self._arrived.get(load.transfer_id, 0),
                )
                self._refuse(load.transfer_id)

    def _refuse(self, transfer_id: str) -> None:
        self._invalid.update(self._awaited.pop(transfer_id).block_ids)
        # Should vLLM let its request run again, no step waits for it a second time.
        self._arrived[transfer_id] = FAILED

    def end_step(self) -> None:
        """After the forward pass: what was not waited for to the end was not read whole."""
        for transfer_id in list(self._awaited):
            self._refuse(transfer_id)

    def take_invalid_blocks(self) -> set[int]:
        """Blocks that the step read although they were not whole."""
        taken, self._invalid = self._invalid, set()
        return taken
