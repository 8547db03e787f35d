"""A prefill's transfer, until no rank writes any more."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from headrace_common.errors import (
    Cancelled,
    HeadraceError,
    InternalError,
    TransferFailed,
    TransferTimeout,
    from_reason,
)
from headrace_kv.messages import SendReport, TransferTarget

_QUIESCE_LIMIT_S = 120.0


class SenderReports:
    """Collects the ranks' reports. `failure` is the first failure. `stop` is called when there is one."""

    def __init__(
        self, target: TransferTarget, rank_count: int, stop: Callable[[str], None]
    ) -> None:
        self.transfer_id = target.transfer_id
        self._deadline_s = target.deadline_s
        self.failure: HeadraceError | None = None
        self._rank_count = rank_count
        self._stop = stop
        self._quiet = asyncio.Event()
        self._reports: dict[int, SendReport] = {}

    @property
    def reports(self) -> tuple[SendReport, ...]:
        """The reports of the ranks that have ended, by rank."""
        return tuple(report for _, report in sorted(self._reports.items()))

    def fail(self, failure: HeadraceError) -> None:
        """Stops every rank. Only the first failure counts."""
        if self.failure is None and not self._quiet.is_set():
            self.failure = failure
            self._stop(self.transfer_id)

    def rank_quiet(self, report: SendReport) -> None:
        """A rank writes no more. Its report may bring the first failure."""
        self._reports[report.rank] = report
        if report.reason:
            self.fail(
                from_reason(
                    report.reason,
                    f"rank {report.rank}: {report.detail}",
                    metadata={"transfer_id": report.transfer_id, "rank": str(report.rank)},
                    default=TransferFailed,
                )
            )
        if len(self._reports) == self._rank_count:
            self._quiet.set()

    def ranks_lost(self, failure: HeadraceError) -> None:
        """The ranks' processes have ended, so none of them writes any more."""
        self.fail(failure)
        self._quiet.set()

    def timeout_error(self) -> TransferTimeout:
        """The error of a deadline that has passed."""
        missing = self._rank_count - len(self._reports)
        return TransferTimeout(
            f"the deadline passed with {missing} of {self._rank_count} ranks still sending",
            metadata={"transfer_id": self.transfer_id},
        )

    async def wait(self) -> None:
        """Returns when every rank is quiet, and stops them at the deadline. Raises the first failure.

        A cancellation waits too: blocks must not be reused before (I2).
        """
        try:
            async with asyncio.timeout(max(0.0, self._deadline_s - time.monotonic())):
                await self._quiet.wait()
        except TimeoutError:
            self.fail(self.timeout_error())
        except asyncio.CancelledError:
            self.fail(Cancelled("the transfer was cancelled"))
            await self._until_quiet()
            raise
        await self._until_quiet()
        if self.failure is not None:
            raise self.failure

    async def _until_quiet(self) -> None:
        cancelled = False
        limit_s = time.monotonic() + _QUIESCE_LIMIT_S
        while not self._quiet.is_set():
            try:
                async with asyncio.timeout(max(0.0, limit_s - time.monotonic())):
                    await self._quiet.wait()
            except asyncio.CancelledError:
                cancelled = True
            except TimeoutError as exc:
                missing = self._rank_count - len(self._reports)
                raise InternalError(
                    f"{missing} ranks still write after {_QUIESCE_LIMIT_S:.0f} s",
                    metadata={"transfer_id": self.transfer_id},
                ) from exc
        if cancelled:
            raise asyncio.CancelledError
