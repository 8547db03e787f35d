"""The states of a transfer and the steps between them. Pure."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from enum import Enum
from typing import Final

from headrace_common.errors import InternalError

_log = logging.getLogger(__name__)


class TransferState(Enum):
    """A transfer's blocks belong to it until FREE."""

    RESERVED = "reserved"
    OPEN = "open"
    RECEIVING = "receiving"
    COMPLETE = "complete"
    FAILED = "failed"
    DRAINING = "draining"
    FREE = "free"


_S = TransferState
NEXT_STATES: Final[dict[TransferState, frozenset[TransferState]]] = {
    _S.RESERVED: frozenset({_S.OPEN, _S.FAILED}),
    _S.OPEN: frozenset({_S.RECEIVING, _S.FAILED}),
    _S.RECEIVING: frozenset({_S.COMPLETE, _S.FAILED}),
    _S.COMPLETE: frozenset({_S.FREE}),
    _S.FAILED: frozenset({_S.DRAINING}),
    _S.DRAINING: frozenset({_S.FREE}),
    _S.FREE: frozenset(),
}
ACTIVE_STATES: Final = frozenset({_S.RESERVED, _S.OPEN, _S.RECEIVING})


class StateMachine:
    """One transfer's states. `transitions` holds each with the Unix time of its entry in nanoseconds."""

    def __init__(self, transfer_id: str, unix_ns: Callable[[], int] = time.time_ns) -> None:
        self._transfer_id = transfer_id
        self._unix_ns = unix_ns
        self._state = TransferState.RESERVED
        self._transitions = [(self._state, unix_ns())]

    @property
    def state(self) -> TransferState:
        return self._state

    @property
    def transitions(self) -> tuple[tuple[TransferState, int], ...]:
        return tuple(self._transitions)

    def entered_unix_ns(self, state: TransferState) -> int:
        """When a state was entered, 0 if it was not entered."""
        return next((unix_ns for entered, unix_ns in self._transitions if entered is state), 0)

    def enter(self, state: TransferState) -> None:
        """Raises InternalError, and changes nothing, when `state` does not follow."""
        if state not in NEXT_STATES[self._state]:
            raise InternalError(
                f"transfer {self._transfer_id} cannot go from {self._state.value} to {state.value}",
                metadata={
                    "transfer_id": self._transfer_id,
                    "from": self._state.value,
                    "to": state.value,
                },
            )
        _log.debug("transfer %s: %s -> %s", self._transfer_id, self._state.value, state.value)
        self._state = state
        self._transitions.append((state, self._unix_ns()))
