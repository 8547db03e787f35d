"""The ids that ranks may report. vLLM ends the whole engine when a rank reports another one."""

from __future__ import annotations

import logging
from collections.abc import Set
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from vllm.v1.outputs import KVConnectorOutput

_LOG = logging.getLogger(__name__)
_NAMED_MAX: Final = 4


class ReportedIds:
    """Knows for which requests vLLM awaits the end of a load, or of a transfer. Each is reported once."""

    def __init__(self) -> None:
        self._asked: set[str] = set()
        """Those that would await a load, once they have blocks."""
        self._loading: set[str] = set()
        self._held: set[str] = set()
        """Ended requests. Their blocks stay until a rank reports the end of a transfer."""
        self.dropped = 0
        """The number of reports that were wrong."""

    def asked(self, request_id: str, *, loads: bool) -> None:
        """vLLM has asked for a request's tokens, and got this answer."""
        if loads:
            self._asked.add(request_id)
        else:
            self._asked.discard(request_id)

    def allocated(self, request_id: str, tokens: int) -> None:
        """A request has blocks for so many loaded tokens."""
        if request_id in self._asked and tokens:
            self._loading.add(request_id)
        self._asked.discard(request_id)

    def finished(self, request_id: str, *, held: bool) -> None:
        """A request has ended. `held`: whether its blocks stay."""
        self._asked.discard(request_id)
        if held:
            self._held.add(request_id)

    def keep_known(self, output: KVConnectorOutput) -> None:
        """Drops from the reports of a step what vLLM does not await."""
        received = self._known(output.finished_recving, self._loading)
        # A request that ended while it loaded is freed by the first report, of either kind.
        self._held -= received
        sent = self._known(output.finished_sending, self._held)
        self._loading -= sent
        if output.finished_recving:
            output.finished_recving.intersection_update(received)
        if output.finished_sending:
            output.finished_sending.intersection_update(sent)

    def _known(self, reported: Set[str] | None, awaited: set[str]) -> set[str]:
        known = awaited & (reported or set())
        awaited -= known
        unknown = (reported or set()) - known
        if unknown:
            self.dropped += len(unknown)
            _LOG.error(
                "ranks reported the end of transfers that vLLM does not await, %d so far; they are ignored: %s",
                self.dropped,
                ", ".join(sorted(unknown)[:_NAMED_MAX]),
            )
        return known
