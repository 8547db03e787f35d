"""Makes the copies between a rank's tiers, on a thread beside the forward pass. Uses no vLLM types."""

from __future__ import annotations

import logging
import queue
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial

from headrace_common.errors import HeadraceError
from headrace_common.tasks import lower_priority
from headrace_engine.connector.step_plan import HostSend, PoolMove, StepPlan
from headrace_kv.prefix.events import Tier
from headrace_kv.tiers.copier import TierCopier
from headrace_kv.tiers.load_times import TierLoad
from headrace_kv.tiers.pool import PoolKeys, RankBlocks, RemotePool, leading
from headrace_kv.tiers.tiers import TierCopy
from headrace_kv.transport.memory import PASSED, Mark


class PoolExecutor:
    """The thread of the tiers begins moves, and the rank's compute thread takes their ends. `on_end` may be called on
    any thread.
    """

    def __init__(self, rank: int, on_end: Callable[[], None] = lambda: None) -> None:
        self._rank = rank
        self._on_end = on_end
        self._opened: tuple[RemotePool, RankBlocks] | None = None
        self._ended: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()

    def attach(self, pool: RemotePool, keys: PoolKeys, memory: int = 0) -> None:
        """Uses a pool from now on, which has the rank's `memory`. Without a pool, moves end at once."""
        self._opened = (pool, RankBlocks(pool, keys, self._rank, memory))

    def begin(self, move: PoolMove) -> None:
        """Begins a move. The copies before it are made."""
        if self._opened is None:
            self.refuse(move)
            return
        _, blocks = self._opened
        begin = blocks.fetch if move.fetches else blocks.store
        moved = begin(move.prefixes, move.block_ids, move.timeout_s)
        moved.add_done_callback(partial(self._end, move.number))

    def refuse(self, move: PoolMove) -> None:
        """Ends a move that was not begun."""
        self._ended.put((move.number, 0))
        self._on_end()

    def take_ended(self) -> list[tuple[int, int]]:
        """Moves that have ended since the last call: (number, blocks that were moved whole, from the first on)."""
        return [self._ended.get() for _ in range(self._ended.qsize())]

    def close(self) -> None:
        """Leaves the pool."""
        if self._opened is not None:
            self._opened[0].close()

    def _end(self, number: int, moved: Future[list[bool]]) -> None:
        self._ended.put((number, leading(moved.result())))
        self._on_end()


log = logging.getLogger(__name__)


class TierExecutor:
    """The rank's compute thread calls it. One thread of low priority makes all copies, in the order of the plans.

    That thread calls `on_end` after each copy, and `on_load` before the end of each load, also of one that failed. It
    calls `send` with blocks of main memory that a transfer may read from then on, and whether they are lost.
    Copies are made when the device has done what was queued before their step: it has passed what `mark` returns.
    """

    def __init__(
        self,
        copier: TierCopier,
        on_load: Callable[[TierLoad], None],
        pool: PoolExecutor | None = None,
        send: Callable[[HostSend, bool], None] = lambda send, lost: None,
        mark: Callable[[], Mark] = lambda: PASSED,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._copier = copier
        self._on_load = on_load
        self._pool = pool
        self._send = send
        self._mark = mark
        # The forward pass goes first where processors are scarce.
        self._thread = ThreadPoolExecutor(1, "kv-tiers", initializer=lower_priority)
        self._on_end = on_end
        self._copies: dict[str, list[Future[bool]]] = {}
        self._loads: dict[str, bool] = {}
        self._received: dict[str, bool] = {}
        self._finishing: dict[str, bool] = {}
        self._sent: set[str] = set()

    def begin_step(self, plan: StepPlan) -> None:
        """Before the forward pass: starts the copies of the plan."""
        mark = self._mark() if plan.copies else PASSED
        sends = deque(plan.host_sends)
        for count, one in enumerate(plan.copies):
            while sends and sends[0].copies_before <= count:
                self._thread.submit(self._send_blocks, sends.popleft())
            copying = self._thread.submit(self._copy, one.copy, mark)
            copying.add_done_callback(lambda _: self._on_end())
            self._copies.setdefault(one.request_id, []).append(copying)
        for send in sends:
            self._thread.submit(self._send_blocks, send)
        if self._pool is not None:
            for move in plan.moves:
                self._thread.submit(self._begin_move, self._pool, move)
        self._loads.update(plan.loads)
        self._finishing.update(plan.finished_stores)
        # A long answer stores a block now and then.
        for request_id in {one.request_id for one in plan.copies} - self._loads.keys():
            self._copies[request_id] = [one for one in self._copies[request_id] if not one.done()]

    def preempt(self, plan: StepPlan) -> None:
        """Before a step that overwrites the blocks of preempted requests. Waits until no copy reads them."""
        for request_id in plan.preempted_stores:
            wait(self._copies.pop(request_id, ()))

    def end_step(
        self, sent: set[str], received: set[str], failed: set[str]
    ) -> tuple[set[str], set[str], set[str]]:
        """After the forward pass. Takes the requests that finished sending and receiving, and those that failed.

        Withholds those with copies under way, and adds those with copies that have ended.
        """
        self._received.update({request_id: request_id in failed for request_id in received})
        self._sent |= sent
        for request_id, with_transfer in tuple(self._loads.items()):
            if self._has_ended(request_id) and (not with_transfer or request_id in self._received):
                del self._loads[request_id]
                copied = self._take_result(request_id)
                self._received[request_id] = self._received.get(request_id, False) or not copied
        for request_id, sends in tuple(self._finishing.items()):
            if self._has_ended(request_id) and (not sends or request_id in self._sent):
                del self._finishing[request_id]
                self._take_result(request_id)
                self._sent.add(request_id)
        ended = {one: failed for one, failed in self._received.items() if one not in self._loads}
        for request_id in ended:
            del self._received[request_id]
        quiet = self._sent - self._finishing.keys()
        self._sent -= quiet
        return quiet, set(ended), {request_id for request_id, failed in ended.items() if failed}

    def take_moves(self) -> list[tuple[int, int]]:
        """See PoolExecutor.take_ended."""
        return [] if self._pool is None else self._pool.take_ended()

    def close(self) -> None:
        """Ends the thread and frees the tiers. Waiting copies are not made."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        if self._pool is not None:
            self._pool.close()
        self._copier.close()

    def _send_blocks(self, send: HostSend) -> None:
        self._send(send, self._copier.host_is_lost)

    def _begin_move(self, pool: PoolExecutor, move: PoolMove) -> None:
        if self._copier.host_is_lost:
            pool.refuse(move)
        else:
            pool.begin(move)

    def _copy(self, copy: TierCopy, mark: Mark) -> bool:
        start_s = time.monotonic()
        failed = False
        try:
            self._copier.copy(copy, mark)
        except HeadraceError as error:
            log.error("a copy from %s to %s: %s", copy.source.name, copy.destination.name, error)
            failed = True
        if copy.destination == Tier.DEVICE:
            load_s = time.monotonic() - start_s
            self._on_load(TierLoad(copy.source, len(copy.source_ids), load_s, failed))
        return not failed

    def _has_ended(self, request_id: str) -> bool:
        return all(copying.done() for copying in self._copies.get(request_id, ()))

    def _take_result(self, request_id: str) -> bool:
        """Whether all copies of the request were made. They have ended."""
        return all(
            not copying.cancelled() and copying.result()
            for copying in self._copies.pop(request_id, ())
        )
