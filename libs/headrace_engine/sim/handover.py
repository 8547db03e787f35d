"""One prefill's transfer, over the senders of all ranks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from headrace_common.errors import (
    Cancelled,
    HeadraceError,
    InternalError,
    TransferFailed,
    TransferTimeout,
    from_reason,
)
from headrace_kv.hidden_state import hidden_state_rank
from headrace_kv.layout import KvLayout
from headrace_kv.messages import LayerRange, SendReport, TransferTarget

if TYPE_CHECKING:
    from headrace_kv.send.sender import RankSender


_QUIESCE_LIMIT_S = 120.0


class Handover:
    """Opens, feeds and ends a transfer on every rank, and collects the ranks' reports.

    `quiesced` is set once no rank writes any more; `failure` is then the first failure, or None.
    """

    def __init__(
        self, target: TransferTarget, senders: Sequence[RankSender], layout: KvLayout
    ) -> None:
        self.target = target
        self.failure: HeadraceError | None = None
        self.quiesced = asyncio.Event()
        self._senders = senders
        self._layout = layout
        self._opened: list[int] = []
        self._reports: dict[int, SendReport] = {}

    @property
    def failed(self) -> bool:
        """Whether there was a failure so far."""
        return self.failure is not None

    async def run(self, on_open: Callable[[], None] = lambda: None) -> None:
        """Opens the transfer, waits until every rank is quiesced, and stops them at the deadline.

        `on_open` is called when `push` may be. Raises the first failure. A cancellation waits too: blocks must not be
        reused before (I2).
        """
        target = self.target
        try:
            self._open()
            on_open()
        except HeadraceError as exc:
            self.fail(exc)
        try:
            async with asyncio.timeout(max(0.0, target.deadline_s - time.monotonic())):
                await self.quiesced.wait()
        except TimeoutError:
            detail = f"transfer {target.transfer_id} ran out of time"
            self.fail(TransferTimeout(detail, metadata={"transfer_id": target.transfer_id}))
        except asyncio.CancelledError:
            self.fail(Cancelled("the transfer was cancelled"))
            await self._wait_quiesced()
            raise
        await self._wait_quiesced()
        if self.failure is not None:
            raise self.failure

    async def _wait_quiesced(self) -> None:
        cancelled = False
        limit_s = time.monotonic() + _QUIESCE_LIMIT_S
        while not self.quiesced.is_set():
            try:
                async with asyncio.timeout(max(0.0, limit_s - time.monotonic())):
                    await self.quiesced.wait()
            except asyncio.CancelledError:
                cancelled = True
            except TimeoutError as exc:
                raise InternalError(
                    f"ranks {self._writing_ranks()} still write after {_QUIESCE_LIMIT_S:.0f} s",
                    metadata={"transfer_id": self.target.transfer_id},
                ) from exc
        if cancelled:
            raise asyncio.CancelledError

    def _open(self) -> None:
        for rank, sender in enumerate(self._senders):
            sender.open(self.target)
            self._opened.append(rank)

    def push(
        self,
        layer: int,
        start_token: int,
        end_token: int,
        block_ids: tuple[int, ...],
        *,
        in_host_memory: bool = False,
    ) -> None:
        """Sends the KV of some tokens of one layer, from the ranks that hold it. See LayerRange."""
        if self.failed:
            return
        computed = LayerRange(
            transfer_id=self.target.transfer_id,
            layer=layer,
            start_token=start_token,
            end_token=end_token,
            block_ids=block_ids,
            ready_ns=time.monotonic_ns(),
            in_host_memory=in_host_memory,
        )
        ranks = self._layout.tensor_parallel_size
        first = self._layout.stage_of(layer) * ranks
        for sender in self._senders[first : first + ranks]:
            sender.push(computed)

    def push_hidden_state(self, state: bytes) -> None:
        """Sends the last token's hidden state."""
        if not self.failed:
            sender = self._senders[hidden_state_rank(self._layout)]
            sender.push_hidden_state(self.target.transfer_id, lambda: state)

    def finish(self) -> None:
        """Nothing more will be pushed."""
        if not self.failed:
            for sender in self._senders:
                sender.finish(self.target.transfer_id)

    def fail(self, failure: HeadraceError) -> None:
        """Stops every rank. Only the first failure counts."""
        if self.failed or self.quiesced.is_set():
            return
        self.failure = failure
        for rank in self._writing_ranks():
            self._senders[rank].stop(self.target.transfer_id, failure.reason, failure.detail)
        self._check_quiesced()

    def rank_quiesced(self, report: SendReport) -> None:
        """A rank writes no more. Its report may bring the first failure."""
        self._reports[report.rank] = report
        if report.reason and not self.failed:
            self.fail(error_of_report(report))
        self._check_quiesced()

    def _check_quiesced(self) -> None:
        all_opened = len(self._opened) == len(self._senders) or self.failed
        if all_opened and not self._writing_ranks():
            self.quiesced.set()

    def _writing_ranks(self) -> tuple[int, ...]:
        return tuple(rank for rank in self._opened if rank not in self._reports)

    @property
    def reports(self) -> tuple[SendReport, ...]:
        """The reports of the ranks that have ended, by rank."""
        return tuple(report for _, report in sorted(self._reports.items()))


def error_of_report(report: SendReport) -> HeadraceError:
    """The error that a failed report stands for."""
    return from_reason(
        report.reason,
        f"rank {report.rank}: {report.detail}",
        metadata={"transfer_id": report.transfer_id, "rank": str(report.rank)},
        default=TransferFailed,
    )
