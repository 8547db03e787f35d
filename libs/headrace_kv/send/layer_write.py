"""One copy of a piece on its way to one decode rank. Plain state of the sender's thread."""

from __future__ import annotations

import time
from dataclasses import dataclass

from headrace_common.errors import InternalError
from headrace_kv.handoff.messages import LayerRange, LayerSent
from headrace_kv.plan.copy_plan import BlockSpan, Runs
from headrace_kv.plan.shard_map import Edge
from headrace_kv.transport.base import KvTransport, WriteResult


@dataclass(frozen=True, slots=True)
class PieceCopy:
    """What one edge of a piece needs: the tokens and blocks of `span`, which acknowledge up to `end_token`."""

    edge: Edge
    span: BlockSpan

    @property
    def start_token(self) -> int:
        return self.span.start_token

    @property
    def end_token(self) -> int:
        return self.span.end_token


class LayerWrite:
    """A copy, cut into batches that are written one by one, and what has become of them.

    `next_batch`, of `next_bytes`, is the next to be taken; None when all are.
    """

    def __init__(
        self, piece: LayerRange, copy: PieceCopy, session: str, runs: Runs, transport: KvTransport
    ) -> None:
        self.copy = copy
        self.layer = piece.layer
        self.session = session
        self.payload_bytes = runs.payload_bytes
        self._run_count = len(runs)
        self._ready_unix_ns = piece.ready_unix_ns
        self._start_unix_ns = time.time_ns()
        self._start_ns = self._end_ns = time.perf_counter_ns()
        self._started = False
        self._batches = runs.batches(transport.entry_limit, transport.byte_limit)
        self._whole = runs
        self.next_batch: Runs | None = None
        self.next_bytes = 0
        self._advance()
        self._pending_count = 0
        self._entry_count = 0
        # Dictionaries keep the order in which the names came.
        self.digest: int | None = None
        self._transports: dict[str, None] = {}
        self._strategies: dict[str, None] = {}

    @property
    def landed(self) -> bool:
        """Whether every batch has been written."""
        return self.next_batch is None and not self._pending_count

    @property
    def runs(self) -> Runs:
        """All that is copied."""
        return self._whole

    def take(self) -> Runs:
        """The next batch, which is under way from now on."""
        batch = self.next_batch
        if batch is None:
            raise InternalError(f"layer {self.layer} has no batch left")
        if not self._started:
            self._started = True
            self._start_unix_ns, self._start_ns = time.time_ns(), time.perf_counter_ns()
        self._advance()
        self._pending_count += 1
        return batch

    def _advance(self) -> None:
        batch = next(self._batches, None)
        self.next_batch = batch
        if batch is not None:
            self.next_bytes = self.payload_bytes if batch is self._whole else batch.payload_bytes

    def note(self, written: WriteResult, end_ns: int) -> None:
        """A batch has landed, at `end_ns` of the performance counter."""
        self._pending_count -= 1
        self._entry_count += written.entry_count
        self._transports[written.transport] = None
        self._strategies[written.strategy] = None
        self._end_ns = max(self._end_ns, end_ns)

    def sent(self) -> LayerSent:
        """What was sent, once all of it has landed."""
        return LayerSent(
            layer=self.layer,
            destination_rank=self.copy.edge.destination_rank,
            start_token=self.copy.start_token,
            end_token=self.copy.end_token,
            payload_bytes=self.payload_bytes,
            run_count=self._run_count,
            ready_unix_ns=self._ready_unix_ns,
            start_unix_ns=self._start_unix_ns,
            duration_ns=max(0, self._end_ns - self._start_ns),
            transport="+".join(self._transports),
            strategy="+".join(self._strategies),
            entry_count=self._entry_count,
        )
