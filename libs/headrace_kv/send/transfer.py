"""The state of one transfer at one prefill rank. Used by the sender's thread only."""

from __future__ import annotations

import time
from collections import deque
from enum import Enum

from headrace_common.errors import InternalError, TransferTimeout
from headrace_kv.copy_plan import BlockSpan
from headrace_kv.hidden_state import OutgoingHiddenState
from headrace_kv.messages import (
    LayerRange,
    Reservation,
    SendReport,
    TransferTarget,
)
from headrace_kv.send.layer_write import LayerWrite, LinkRecord, WritePlan
from headrace_kv.send.peer import SenderPeer
from headrace_kv.shard_map import Edge
from headrace_kv.tickets import digest_seed

_LAYERS_NAMED_MAX = 16


class TransferPhase(Enum):
    """The phases of a transfer at one rank."""

    CONNECTING = "connecting"
    """Waits for the handshake with the decode worker."""
    OPENING = "opening"
    """Open is sent. Waits for the reservation."""
    SENDING = "sending"
    """Ranges are planned and written as they come, until everything has landed."""
    STOPPED = "stopped"
    """No write starts any more. Waits for the batches in flight and the quiet time."""


# A member is looked up here several times a write, which costs 0.2 us each on the class.
_CONNECTING, _OPENING, _SENDING, _STOPPED = TransferPhase


class OutgoingTransfer:
    """The only owner of a transfer's state. Others report events to it and ask what to do next.

    The transfer is quiet when no batch is in flight and the quiet time after the last failed batch has passed.
    """

    def __init__(
        self, target: TransferTarget, peer: SenderPeer, rank: int, deadline_s: float
    ) -> None:
        self.target = target
        self.peer = peer
        self.deadline_s = deadline_s
        self.digest_seed = digest_seed(target.ticket)
        """The seed of its digests."""
        self.hidden_state: OutgoingHiddenState | None = None
        if target.with_hidden_state and peer.sends_hidden_state:
            self.hidden_state = OutgoingHiddenState(target.transfer_id, self.digest_seed)
        self._rank = rank
        self._phase = _CONNECTING
        self._plan: WritePlan | None = None
        self._ask_again_s = 0.0
        self._decode_waits = False
        # Each with the total of the peer's WindowWait at the time of the push.
        self._ranges: deque[tuple[LayerRange, int]] = deque()
        self._push_finished = False
        self._unacknowledged: deque[LayerWrite] = deque()
        self._batches_in_flight = 0
        self._quiet_s = 0.0
        self._reason = ""
        self._detail = ""
        self._links: dict[int, LinkRecord] = {}
        self._reserved_ns = 0
        self._payload_bytes = 0
        self._control_bytes = 0

    # Questions.

    @property
    def transfer_id(self) -> str:
        return self.target.transfer_id

    @property
    def awaits_reservation(self) -> bool:
        """Whether Open is sent and not answered."""
        return self._phase is _OPENING

    @property
    def sending(self) -> bool:
        """Whether there is a reservation, and writes may start."""
        return self._phase is _SENDING

    @property
    def stopped(self) -> bool:
        """Whether no write may start any more."""
        return self._phase is _STOPPED

    @property
    def decode_waits(self) -> bool:
        """Whether decode waits for the end of the transfer: from Open until Commit or the loss of the stream."""
        return self._decode_waits

    @property
    def nothing_to_send(self) -> bool:
        """Whether the plan has neither edges nor a hidden state for this rank."""
        if self._plan is None or self._plan.edge_count:
            return False
        return self.hidden_state is None

    @property
    def has_ranges(self) -> bool:
        """Whether pushed ranges wait to be planned."""
        return bool(self._ranges)

    @property
    def complete(self) -> bool:
        """Whether everything that this rank must send has landed or, for a hidden state, is sent."""
        if self._plan is None or not self._plan.complete:
            return False
        return self.hidden_state is None or self.hidden_state.sent

    @property
    def ended_short(self) -> bool:
        """Whether the engine pushes no more and nothing is left to plan or to land."""
        return self._push_finished and not self._ranges and not self._unacknowledged

    @property
    def payload_bytes(self) -> int:
        """Bytes of the writes that have landed."""
        return self._payload_bytes

    def must_ask_again(self, now_s: float) -> bool:
        """Whether decode should have answered Open by now."""
        return self.awaits_reservation and now_s >= self._ask_again_s

    def quiet_at_s(self) -> float | None:
        """When the transfer is quiet, by the monotonic clock; None while batches are in flight."""
        return None if self._batches_in_flight else self._quiet_s

    def missing(self) -> str:
        """What is not sent, e.g. "layers 3, 7, 8 (3 of 30)"."""
        if self._plan is None or self._phase in (_CONNECTING, _OPENING):
            return "every layer"
        layers = self._plan.missing_layers()
        if not layers and self.hidden_state is not None and not self.hidden_state.sent:
            return "the hidden state"
        named = ", ".join(str(layer) for layer in layers[:_LAYERS_NAMED_MAX])
        more = ", ..." if len(layers) > _LAYERS_NAMED_MAX else ""
        return f"layers {named}{more} ({len(layers)} of {self._plan.layer_count})"

    def timeout_error(self) -> TransferTimeout:
        """The error of a deadline that has passed."""
        if self._phase is _CONNECTING:
            waited_for = f"the handshake with {self.target.decode}"
        elif self._phase is _OPENING:
            waited_for = f"the reservation of {self.target.decode}"
        else:
            waited_for = self.missing()
        return TransferTimeout(
            f"the deadline of {self.transfer_id} passed while waiting for {waited_for}",
            metadata={"transfer_id": self.transfer_id, "waited_for": waited_for},
        )

    def report(self, host: str = "", memory: str = "host") -> SendReport:
        """Describes what the rank did. `host` and `memory` are those of SendReport."""
        return SendReport(
            self.transfer_id,
            self._rank,
            self._reason,
            self._detail,
            tuple(link.report() for link in self._links.values()),
            self._control_bytes,
            host,
            memory,
        )

    # Events of the stream.

    def planned(self, plan: WritePlan) -> None:
        """The writes are planned, from decode's layout."""
        self._plan = plan

    def open_sent(self, ask_again_s: float) -> None:
        """Open is sent, and sent again at `ask_again_s` unless decode answers."""
        self._phase = _OPENING
        self._ask_again_s = ask_again_s
        self._decode_waits = True

    def reservation_received(self, reservation: Reservation) -> None:
        """Decode answered Open. Raises ProtocolViolation when its blocks do not hold the tokens."""
        self._required_plan().reserve(reservation)
        self._phase = _SENDING
        self._reserved_ns = time.monotonic_ns()

    def control_bytes_counted(self, nbytes: int) -> None:
        """A message about the transfer was sent or received."""
        self._control_bytes += nbytes

    def commit_sent(self) -> None:
        """Commit is sent, so decode waits for no further message."""
        self._decode_waits = False

    def stream_lost(self) -> None:
        """The stream has ended. Decode ends the transfer by itself."""
        self._decode_waits = False

    # Events of the engine.

    def range_pushed(self, layer_range: LayerRange) -> None:
        """The engine pushed a range."""
        self._ranges.append((layer_range, self.peer.window_wait.total_ns()))

    def push_finished(self) -> None:
        """The engine pushes no more."""
        self._push_finished = True

    # Events of the writes.

    def next_range(self) -> tuple[LayerRange, int]:
        """Removes and returns the oldest range that waits to be planned.

        The second value is the total of the peer's WindowWait when the range was pushed.
        """
        return self._ranges.popleft()

    def claim(self, layer_range: LayerRange) -> list[tuple[Edge, BlockSpan]]:
        """See WritePlan.claim."""
        return self._required_plan().claim(layer_range)

    def write_planned(self, write: LayerWrite) -> None:
        """A write waits to be started. Writes are acknowledged in the order in which they were planned."""
        self._unacknowledged.append(write)

    def batch_started(self) -> None:
        """The transport has a batch of one of the writes."""
        self._batches_in_flight += 1

    def batch_ended(self) -> None:
        """The transport has ended a batch, successfully or not."""
        self._batches_in_flight -= 1

    def batch_failed(self, quiet_s: float) -> None:
        """Bytes of a failed batch may land until `quiet_s` of the monotonic clock."""
        self._quiet_s = max(self._quiet_s, quiet_s)

    def next_landed(self) -> LayerWrite | None:
        """Removes, counts and returns the oldest write if all of it has landed. The caller acknowledges it."""
        if not self._unacknowledged or not self._unacknowledged[0].landed:
            return None
        write = self._unacknowledged.popleft()
        self._required_plan().landed(write.layer, write.destination_rank, write.end_token)
        self._payload_bytes += write.payload_bytes
        self._link_of(write).add_landed(write, self._reserved_ns, time.monotonic_ns())
        return write

    # The end.

    def stop(self, reason: str, detail: str) -> None:
        """Starts no more writes. The first reason counts."""
        if not self.stopped:
            self._phase = _STOPPED
            self._reason, self._detail = reason, detail
            now_ns = time.monotonic_ns()
            for write in self._unacknowledged:
                self._link_of(write).add_unfinished(write, self._reserved_ns, now_ns)
            self._unacknowledged.clear()

    def drop_ranges(self) -> int:
        """Drops the ranges that wait to be planned; returns how many there were."""
        count = len(self._ranges)
        self._ranges.clear()
        return count

    def _link_of(self, write: LayerWrite) -> LinkRecord:
        link = self._links.get(write.destination_rank)
        if link is None:
            link = self._links[write.destination_rank] = LinkRecord(write)
        return link

    def _required_plan(self) -> WritePlan:
        if self._plan is None:
            raise InternalError(f"{self.transfer_id} has no plan yet")
        return self._plan
