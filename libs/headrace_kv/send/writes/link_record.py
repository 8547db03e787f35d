"""Records the writes of one transfer link. Used by the sender's thread only."""

from __future__ import annotations

from array import array

from headrace_common.latency.clock_pair import clocks_now
from headrace_common.telemetry.layer_stamps import NEVER, WORDS_PER_WRITE, WRITES_MAX, pack_writes
from headrace_kv.handoff.messages import LinkSent
from headrace_kv.send.writes.layer_write import LayerWrite
from headrace_kv.transport.sessions import find_host

_WORD_MAX = NEVER - 1
_WORDS_MAX = 2 * WRITES_MAX * WORDS_PER_WRITE


class LinkRecord:
    """What a rank wrote to one decode rank for one transfer. Keeps the times of the last writes in one array.

    Add the writes in the order in which they were planned.
    """

    def __init__(self, first: LayerWrite) -> None:
        self._destination_rank = first.destination_rank
        self._session = first.session
        self._start_ns = first.ready_ns
        self._words = array("I")
        # Dictionaries keep the order in which the names were added.
        self._transports: dict[str, None] = {}
        self._strategies: dict[str, None] = {}
        self._payload_bytes = self._run_count = self._entry_count = self._write_count = 0
        self._submitted_ns = 0
        self._ready_ns = self._landed_ns = self._end_ns = self._start_ns
        self._moving_ns = 0

    def add_landed(self, write: LayerWrite, reserved_ns: int, now_ns: int) -> None:
        """A write has landed and is acknowledged now. The transfer had its reservation at `reserved_ns`."""
        self._payload_bytes += write.payload_bytes
        self._run_count += len(write.runs)
        self._entry_count += write.entry_count
        for result in write.results:
            self._transports[result.transport] = None
            self._strategies[result.strategy] = None
        landed_ns = write.landed_ns or now_ns
        submitted_ns = write.submitted_ns or landed_ns
        gathered_ns = submitted_ns
        staging_us = gather_us = 0
        if write.gather_ns or write.staging_wait_ns:
            gathered_ns = min(landed_ns, submitted_ns + write.staging_wait_ns + write.gather_ns)
            staging_ns = min(write.staging_wait_ns, gathered_ns - submitted_ns)
            staging_us = staging_ns // 1000
            gather_us = (gathered_ns - submitted_ns - staging_ns) // 1000
        idle_ns = max(gathered_ns, self._landed_ns)
        if landed_ns > idle_ns:
            self._moving_ns += landed_ns - idle_ns
        self._landed_ns = max(self._landed_ns, landed_ns)
        self._end_ns = max(self._end_ns, now_ns)
        move_us = (landed_ns - gathered_ns) // 1000
        times_us = (staging_us, gather_us, move_us, (now_ns - landed_ns) // 1000)
        self._add(write, reserved_ns, submitted_ns, times_us)

    def add_unfinished(self, write: LayerWrite, reserved_ns: int, now_ns: int) -> None:
        """The transfer ends now, and the write has not landed as a whole."""
        submitted_ns = write.submitted_ns or now_ns
        waited_us = max(0, now_ns - submitted_ns) // 1000
        self._add(write, reserved_ns, submitted_ns, (0, 0, NEVER, waited_us))
        self._end_ns = max(self._end_ns, now_ns)

    def report(self) -> LinkSent:
        """Describes the link."""
        now = clocks_now()
        start_unix_ns = now.unix_ns - (now.monotonic_ns - self._start_ns)
        return LinkSent(
            destination_rank=self._destination_rank,
            destination_host=find_host(self._session),
            transport="+".join(self._transports),
            strategy="+".join(self._strategies),
            payload_bytes=self._payload_bytes,
            run_count=self._run_count,
            entry_count=self._entry_count,
            write_count=self._write_count,
            start_unix_ns=start_unix_ns,
            submitted_unix_ns=start_unix_ns + self._submitted_ns - self._start_ns,
            ready_unix_ns=start_unix_ns + self._ready_ns - self._start_ns,
            landed_unix_ns=start_unix_ns + self._landed_ns - self._start_ns,
            end_unix_ns=start_unix_ns + self._end_ns - self._start_ns,
            moving_ns=self._moving_ns,
            layers=pack_writes(self._words),
        )

    def _add(
        self,
        write: LayerWrite,
        reserved_ns: int,
        submitted_ns: int,
        times_us: tuple[int, int, int, int],
    ) -> None:
        """`times_us` are the last four words."""
        ready_ns = write.ready_ns
        self._write_count += 1
        self._ready_ns = max(self._ready_ns, ready_ns)
        self._submitted_ns = self._submitted_ns or submitted_ns
        wait_ns = max(0, submitted_ns - ready_ns)
        lease_ns = window_ns = 0
        if reserved_ns > ready_ns:
            lease_ns = min(reserved_ns - ready_ns, wait_ns)
        if write.window_wait_ns:
            window_ns = min(write.window_wait_ns, wait_ns - lease_ns)
        words = self._words
        if len(words) >= _WORDS_MAX:
            del words[: _WORDS_MAX // 2]
        row = (
            write.layer,
            write.start_token,
            write.end_token,
            write.payload_bytes,
            (ready_ns - self._start_ns) // 1000,
            lease_ns // 1000,
            window_ns // 1000,
            wait_ns // 1000,
            *times_us,
        )
        try:
            words.extend(row)
        except OverflowError:
            # `extend` keeps the words before the one that is too large or negative.
            del words[len(words) - len(words) % WORDS_PER_WRITE :]
            words.extend([NEVER if word == NEVER else max(0, min(word, _WORD_MAX)) for word in row])
