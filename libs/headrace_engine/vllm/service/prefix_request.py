"""The sending of what one decode request has cached, until the last rank is quiet."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from headrace_common.deadlines import Deadline
from headrace_common.errors import (
    HeadraceError,
    InternalError,
    TransferFailed,
    TransferTimeout,
    from_reason,
)
from headrace_kv.handoff.messages import SendReport, TransferTarget

if TYPE_CHECKING:
    from headrace_engine.vllm.link.server import LinkServer

log = logging.getLogger(__name__)

QUIET_TIMEOUT_S: Final = 30.0


class PrefixRequest:
    """Call `run` once. The link calls `transfer_quiet` and `engine_lost`.

    `on_quiet` is called once, when no rank reads the blocks any more, also after `run` has given up.
    """

    def __init__(
        self,
        link: LinkServer,
        target: TransferTarget,
        rank_count: int,
        on_quiet: Callable[[], None],
    ) -> None:
        self._link = link
        self._target = target
        self._rank_count = rank_count
        self._on_quiet = on_quiet
        self._reports: dict[int, SendReport] = {}
        self._failure: HeadraceError | None = None
        self._stopped = False
        self._quiet = asyncio.Event()

    def transfer_quiet(self, report: SendReport) -> None:
        """A rank reads no block any more. The others stop when it has failed."""
        self._reports[report.rank] = report
        if report.reason:
            name = report.transfer_id
            detail = f"rank {report.rank}: {report.detail}"
            metadata = {"transfer_id": name, "rank": str(report.rank)}
            self._fail(
                from_reason(report.reason, detail, metadata=metadata, default=TransferFailed)
            )
        if len(self._reports) == self._rank_count and not self._quiet.is_set():
            self._link.prefix_sent(self._target.transfer_id)
            self._end()

    def engine_lost(self, error: HeadraceError) -> None:
        """The engine's processes have ended, so none of them reads any more."""
        self._failure = self._failure or error
        if not self._quiet.is_set():
            self._end()

    async def run(self) -> tuple[SendReport, ...]:
        """See Engine.send_prefix."""
        self._link.send_prefix(self._target)
        try:
            async with asyncio.timeout(Deadline(self._target.deadline_s).remaining_s()):
                await self._quiet.wait()
        except TimeoutError:
            name = self._target.transfer_id
            self._fail(
                TransferTimeout(
                    f"the prefix of transfer {name} was not sent in time",
                    metadata={"transfer_id": name},
                )
            )
        finally:
            if not self._quiet.is_set():
                self._stop()
                await asyncio.shield(asyncio.create_task(self._wait_quiet()))
        if self._failure is not None:
            raise self._failure
        return tuple(report for _, report in sorted(self._reports.items()))

    def _fail(self, failure: HeadraceError) -> None:
        """The first failure counts."""
        self._failure = self._failure or failure
        if len(self._reports) < self._rank_count:
            self._stop()

    def _stop(self) -> None:
        if not self._stopped:
            self._stopped = True
            self._link.stop(self._target.transfer_id)

    def _end(self) -> None:
        self._quiet.set()
        self._on_quiet()

    async def _wait_quiet(self) -> None:
        try:
            async with asyncio.timeout(QUIET_TIMEOUT_S):
                await self._quiet.wait()
        except TimeoutError:
            missing = self._rank_count - len(self._reports)
            what = f"{missing} of {self._rank_count} ranks still send the prefix of"
            log.error("%s %s", what, self._target.transfer_id)
            self._fail(InternalError(f"{what} {self._target.transfer_id}"))
