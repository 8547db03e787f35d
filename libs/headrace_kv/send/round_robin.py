"""Whose turn it is to be written to. Plain state of the sender's thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from headrace_kv.send.layer_write import LayerWrite
from headrace_kv.send.peer import SenderPeer
from headrace_kv.send.transfer import OutgoingTransfer

Step = tuple[SenderPeer, OutgoingTransfer, LayerWrite | None]
"""The next batch of this copy is to be written; without a copy, the transfer's next piece is to be planned."""


class RoundRobinQueue:
    """The workers that have something to be written, in turn; one that has to wait holds up no other."""

    def __init__(self, has_room: Callable[[str, int], bool]) -> None:
        self._has_room = has_room
        self._turns: deque[SenderPeer] = deque()
        self._stalled = False

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do until a write ends or a piece comes."""
        return self._stalled or not self._turns

    def give(self, peer: SenderPeer) -> None:
        """A worker has something to be written."""
        self._stalled = False
        if not peer.in_turn:
            peer.in_turn = True
            self._turns.append(peer)

    def write_ended(self) -> None:
        """There may be room where there was none."""
        self._stalled = False

    def next_step(self) -> Step | None:
        """What to do next; None when every worker has to wait for a write to end."""
        for _ in range(len(self._turns)):
            peer = self._turns.popleft()
            peer.in_turn = False
            following = peer.next_write()
            if following is not None:
                transfer, write = following
                self.give(peer)
                if self._has_room(write.session, write.next_bytes):
                    return peer, transfer, write
            elif (ready := peer.next_ready()) is not None:
                self.give(peer)
                return peer, ready, None
        self._stalled = bool(self._turns)
        return None
