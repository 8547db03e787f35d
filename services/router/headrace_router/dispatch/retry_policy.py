"""What a request's failed attempts tell about who may try next."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Final

from headrace_common.errors import (
    Cancelled,
    DecodeFull,
    Draining,
    HeadraceError,
    InvalidRequest,
    KvCorrupt,
    LayoutMismatch,
    ProtocolViolation,
    StaleIncarnation,
    TransferFailed,
    TransferTimeout,
    WorkerGone,
)
from headrace_kv.layout.layout import WorkerRef
from headrace_router.dispatch.attempt import Attempt

_RETRY_TIME_MIN_S: Final = 1.0
_FULL_S: Final = 0.5

# The pair failed: its prefill worker is not asked again, its decode worker only if it is alone. Cancelled is a prefill
# worker's that ends before its task: a caller that goes away is heard elsewhere first.
_PAIR_ERRORS = (Cancelled, TransferFailed, TransferTimeout, LayoutMismatch, ProtocolViolation)
# The decode worker said that it will not take this request, or will not end it.
_REFUSALS = (DecodeFull, Draining, StaleIncarnation)


@dataclass(slots=True)
class RetryState:
    """Who failed so far.

    Nobody in `failed` is asked again, and nobody in `suspect` while there is another. `attempts_left` are those after
    a failure. A decode worker that drains or is another one by now costs none, for it is not asked again; once the
    client has tokens, one that was full costs none either, and is asked a while later, but not when no attempt has
    brought a token for `patience_s`.
    """

    attempts_left: int
    patience_s: float
    failed: set[WorkerRef] = field(default_factory=set)
    suspect: set[WorkerRef] = field(default_factory=set)
    full: dict[WorkerRef, float] = field(default_factory=dict)
    """Decode workers that had no room, and when that was, by time.monotonic."""
    prefill_side: bool = False
    last_error: HeadraceError | None = None
    _waiting_since_s: float = 0.0

    @property
    def wait_left_s(self) -> float:
        """How much longer an answer that has begun may wait for somebody to go on with it."""
        return self._waiting_since_s + self.patience_s - time.monotonic()

    @property
    def excluded(self) -> frozenset[WorkerRef]:
        """Those that may not be asked now."""
        return frozenset(self.failed | self.full.keys())

    @property
    def local_only(self) -> bool:
        """Whether prefill workers have failed so often that the last attempt does without."""
        return self.prefill_side and not self.attempts_left

    def forget_full(self) -> None:
        """Workers that were full a while ago may be asked again."""
        since_s = time.monotonic() - _FULL_S
        self.full = {ref: at_s for ref, at_s in self.full.items() if at_s > since_s}

    def note(
        self, error: HeadraceError, attempt: Attempt, *, begun: bool, remaining_s: float
    ) -> bool:
        """Takes a failed attempt into account; whether another may be made. `begun`: the client has tokens."""
        self.last_error = error
        if attempt.decode_spoke or not self._waiting_since_s:
            self._waiting_since_s = time.monotonic()
        if isinstance(error, Draining | StaleIncarnation) and (begun or not attempt.prefill_failed):
            self.failed.add(attempt.decode_worker)
            return remaining_s > 0
        if begun and isinstance(error, DecodeFull) and not attempt.decode_spoke:
            self.full[attempt.decode_worker] = time.monotonic()
            return remaining_s > 0 and self.wait_left_s > 0
        affordable = self.attempts_left > 0 and remaining_s > 0
        self.attempts_left -= 1
        return self._lay(error, attempt, remaining_s) and affordable

    def _lay(self, error: HeadraceError, attempt: Attempt, remaining_s: float) -> bool:
        """Puts the blame on somebody; False when no other attempt can help."""
        decode = attempt.decode_worker
        if attempt.prefill_failed and not isinstance(error, InvalidRequest | KvCorrupt):
            self._blame_prefill(attempt)
            if isinstance(error, (*_PAIR_ERRORS, StaleIncarnation)):
                self.suspect.add(decode)
            return True
        if isinstance(error, _PAIR_ERRORS):
            if not attempt.decode_spoke:
                self._blame_prefill(attempt)
            self.suspect.add(decode)
            # An error that names the missing keys says more than the deadline of a hopeless retry.
            return not isinstance(error, TransferTimeout) or remaining_s > _RETRY_TIME_MIN_S
        if isinstance(error, _REFUSALS):
            self.failed.add(decode)
            return True
        self.suspect.add(decode)
        return isinstance(error, WorkerGone)

    def _blame_prefill(self, attempt: Attempt) -> None:
        self.prefill_side = True
        if attempt.prefill_worker is not None:
            self.failed.add(attempt.prefill_worker)
