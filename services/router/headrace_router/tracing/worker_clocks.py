"""The clocks of workers, as the exchanges of every request with them show."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Final

from opentelemetry.util.types import AttributeValue

from headrace_common.latency.clocks import ClockDifference, ClockOffset, clocks_now
from headrace_common.telemetry import schema

_WORKERS_MAX: Final = 4_096


class WorkerClocks:
    """Relates workers' wall clocks to this router's monotonic clock. One event loop owns it.

    Only the last 4,096 workers are kept.
    """

    def __init__(self) -> None:
        self._clocks: OrderedDict[str, ClockOffset] = OrderedDict()

    def clock(self, worker_id: str) -> ClockOffset:
        """The clock of a worker, to add exchanges to."""
        found = self._clocks.get(worker_id)
        if found is not None:
            self._clocks.move_to_end(worker_id)
            return found
        while len(self._clocks) >= _WORKERS_MAX:
            self._clocks.popitem(last=False)
        clock = self._clocks[worker_id] = ClockOffset()
        return clock

    def difference(self, worker_id: str) -> ClockDifference | None:
        """From this router's wall clock now. None while it is unknown."""
        clock = self._clocks.get(worker_id)
        if clock is None or not clock.known:
            return None
        return difference_now(clock)


def difference_now(clock: ClockOffset) -> ClockDifference:
    """The difference between a clock and this host's wall clock now."""
    now = clocks_now()
    own_ns = now.unix_ns - now.monotonic_ns
    return ClockDifference(clock.offset_ns - own_ns, clock.error_ns + now.error_ns)


def clock_attributes(differences: Mapping[str, ClockDifference]) -> dict[str, AttributeValue]:
    """The attributes of a root span about the clocks of its request's workers. None without workers.

    They are for collectors: these receive the workers' spans with the times of the workers' own clocks.
    """
    if not differences:
        return {}
    return {
        schema.ATTRIBUTE_CLOCK_WORKER_IDS: tuple(differences),
        schema.ATTRIBUTE_CLOCK_WORKERS_AHEAD_MS: tuple(
            one.ahead_ns / 1e6 for one in differences.values()
        ),
        schema.ATTRIBUTE_CLOCK_WORKERS_ERROR_MS: tuple(
            one.error_ns / 1e6 for one in differences.values()
        ),
    }
