"""Which failures of an attempt exclude which workers, and which cost a retry: see RULES."""

from __future__ import annotations

import math
import time
from collections.abc import Collection
from dataclasses import KW_ONLY, dataclass
from enum import Enum, auto
from typing import Final, TypeAlias

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
from headrace_kv.layout import WorkerRef

ErrorClasses: TypeAlias = tuple[type[HeadraceError], ...]

_FULL_WORKER_PAUSE_S: Final = 0.5
# Decode frees the slot of an ended request a few milliseconds after the router has read its end.
TAKEN_SLOT_PAUSE_S: Final = 0.02
_TAKEN_SLOT_PAUSE_MAX_S: Final = 0.32
# A retry in less time would fail with the deadline. TransferTimeout is more precise: it names the missing keys.
_RETRY_AFTER_TIMEOUT_MIN_S: Final = 1.0

# Errors of the pair of workers. A prefill worker that shuts down before its task has ended reports Cancelled.
PAIR_ERRORS: Final = (Cancelled, TransferFailed, TransferTimeout, LayoutMismatch, ProtocolViolation)


@dataclass(frozen=True, slots=True)
class FailedAttempt:
    """What is known of a failed attempt.

    `prefill_failed` is set when the prefill side reported the error. `decode_generated` is set when the decode worker
    sent a token that it computed from the KV cache: from then on, prefill cannot be the cause.
    """

    error: HeadraceError
    decode_worker: WorkerRef
    prefill_worker: WorkerRef | None
    prefill_failed: bool
    decode_generated: bool


class Retry(Enum):
    """Whether another attempt may follow, and whether that uses up one of the request's retries."""

    NO = auto()
    COSTS_ONE = auto()
    FREE = auto()
    FREE_WITHIN_WAIT = auto()
    """Free until no attempt has generated a token for the migration wait."""
    FREE_WITHIN_SLOT_WAIT = auto()
    """Free until the slot wait is over, which begins with the first such failure."""


class Decode(Enum):
    """Whether the next attempt may use the same decode worker."""

    KEEP = auto()
    AVOID = auto()
    """Only when no other worker is left."""
    EXCLUDE = auto()
    EXCLUDE_WHILE_FULL = auto()
    """Not for the next 0.5 s."""
    EXCLUDE_WHILE_TAKEN = auto()
    """Not for the next 0.02 s, longer after each failure."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What follows from a failure with one of `errors` that meets every condition. A condition of None is met."""

    errors: ErrorClasses
    _: KW_ONLY
    # Conditions. See FailedAttempt for the first two.
    prefill_failed: bool | None = None
    decode_generated: bool | None = None
    client_has_tokens: bool | None = None
    # Consequences.
    decode: Decode
    exclude_prefill: bool = False
    retry: Retry = Retry.COSTS_ONE
    time_left_min_s: float = 0.0
    """A retry needs more time than this before the deadline."""

    def matches(self, failed: FailedAttempt, client_has_tokens: bool) -> bool:
        """Whether this rule applies to the failure."""
        conditions = (
            (self.prefill_failed, failed.prefill_failed),
            (self.decode_generated, failed.decode_generated),
            (self.client_has_tokens, client_has_tokens),
        )
        return isinstance(failed.error, self.errors) and all(
            wanted is None or wanted is actual for wanted, actual in conditions
        )


_LEAVING: Final = (Draining, StaleIncarnation)

# The first rule that matches applies. The last one matches every failure.
RULES: Final = (
    # The decode worker drains, or was restarted. It is not asked again, so this costs no retry.
    Rule(_LEAVING, prefill_failed=False, decode=Decode.EXCLUDE, retry=Retry.FREE),
    Rule(_LEAVING, client_has_tokens=True, decode=Decode.EXCLUDE, retry=Retry.FREE),
    # A full decode worker has room again soon: a response that has started waits for it.
    Rule(
        (DecodeFull,),
        client_has_tokens=True,
        decode_generated=False,
        decode=Decode.EXCLUDE_WHILE_FULL,
        retry=Retry.FREE_WITHIN_WAIT,
    ),
    # The slot or the blocks of an ended request, or those that another router uses, are free again soon. The request
    # was admitted to a slot, so other requests must not delay it for longer than its share allows.
    Rule(
        (DecodeFull,),
        client_has_tokens=False,
        decode=Decode.EXCLUDE_WHILE_TAKEN,
        retry=Retry.FREE_WITHIN_SLOT_WAIT,
    ),
    # An invalid request fails everywhere. Corrupt data must be reported.
    Rule((InvalidRequest, KvCorrupt), decode=Decode.AVOID, retry=Retry.NO),
    # The prefill side reported the error.
    Rule(
        (*PAIR_ERRORS, StaleIncarnation),
        prefill_failed=True,
        decode=Decode.AVOID,
        exclude_prefill=True,
    ),
    Rule((HeadraceError,), prefill_failed=True, decode=Decode.KEEP, exclude_prefill=True),
    # The decode side reported the error.
    Rule(
        (TransferTimeout,),
        decode_generated=True,
        decode=Decode.AVOID,
        time_left_min_s=_RETRY_AFTER_TIMEOUT_MIN_S,
    ),
    Rule(
        (TransferTimeout,),
        decode=Decode.AVOID,
        exclude_prefill=True,
        time_left_min_s=_RETRY_AFTER_TIMEOUT_MIN_S,
    ),
    Rule(PAIR_ERRORS, decode_generated=True, decode=Decode.AVOID),
    Rule(PAIR_ERRORS, decode=Decode.AVOID, exclude_prefill=True),
    Rule((DecodeFull,), decode=Decode.EXCLUDE),
    Rule((WorkerGone,), decode=Decode.AVOID),
    # Other errors, such as a bug in a worker, would be repeated on other workers.
    Rule((HeadraceError,), decode=Decode.AVOID, retry=Retry.NO),
)


class RetryState:
    """The failures of one request so far, and the retries that are left.

    `excluded` workers are not asked again, `avoided` workers only when no other is left.
    """

    def __init__(
        self,
        retries_left: int,
        migration_wait_s: float,
        *,
        avoided: Collection[WorkerRef] = (),
    ) -> None:
        """`migration_wait_s`: how long a response that has started may wait for another decode worker."""
        self._retries_left = retries_left
        self._migration_wait_s = migration_wait_s
        self.failed: frozenset[WorkerRef] = frozenset()
        """Workers that may not be asked again."""
        self.avoided = frozenset(avoided)
        """Workers that may be asked only when no other is left."""
        self._full_until_s: dict[WorkerRef, float] = {}
        """By time.monotonic."""
        self.prefill_excluded = False
        """Whether a prefill has failed."""
        self._waiting_since_s = 0.0
        self._slot_wanted_since_s = math.inf
        self._slot_pause_s = TAKEN_SLOT_PAUSE_S
        self.last_error: HeadraceError | None = None
        """The error of the latest attempt."""

    @property
    def excluded(self) -> frozenset[WorkerRef]:
        """Workers that may not be asked now: failed ones, and decode workers that were full just now."""
        return self.failed.union(self._full_until_s) if self._full_until_s else self.failed

    @property
    def full(self) -> bool:
        """Whether a decode worker was full just now."""
        return bool(self._full_until_s)

    @property
    def needs_blocks(self) -> bool:
        """Whether the last worker that was asked had no blocks for the request."""
        return isinstance(self.last_error, DecodeFull) and self.last_error.needs_blocks

    @property
    def local_only(self) -> bool:
        """Whether decode must prefill: a prefill has failed, and this is the last attempt."""
        return self.prefill_excluded and not self._retries_left

    @property
    def wait_left_s(self) -> float:
        """Seconds for which a response that has started may still wait for a decode worker."""
        return self._waiting_since_s + self._migration_wait_s - time.monotonic()

    def exclude_worker(self, ref: WorkerRef) -> None:
        """Excludes a worker that left before it was asked."""
        self.failed |= {ref}

    def readmit_full_workers(self, pause_s: float = 0.0) -> None:
        """Admits decode workers again after their pause, or that much earlier."""
        if self._full_until_s:
            now_s = time.monotonic() + pause_s
            self._full_until_s = {
                ref: until_s for ref, until_s in self._full_until_s.items() if until_s > now_s
            }

    def record_failure(
        self,
        failed: FailedAttempt,
        *,
        client_has_tokens: bool,
        time_left_s: float,
        slot_wait_s: float = 0.0,
    ) -> bool:
        """Applies the rule for a failed attempt. Returns whether another attempt may be made.

        `slot_wait_s`: how long the request may wait for a taken slot.
        """
        self.last_error = failed.error
        if failed.decode_generated or not self._waiting_since_s:
            self._waiting_since_s = time.monotonic()
        rule = next(rule for rule in RULES if rule.matches(failed, client_has_tokens))
        self._exclude_workers(rule, failed)
        return self._may_retry(rule.retry, slot_wait_s) and time_left_s > rule.time_left_min_s

    def _exclude_workers(self, rule: Rule, failed: FailedAttempt) -> None:
        if rule.exclude_prefill:
            self.prefill_excluded = True
            if failed.prefill_worker is not None:
                self.failed |= {failed.prefill_worker}
        match rule.decode:
            case Decode.AVOID:
                self.avoided |= {failed.decode_worker}
            case Decode.EXCLUDE:
                self.failed |= {failed.decode_worker}
            case Decode.EXCLUDE_WHILE_FULL:
                self._exclude_for(failed.decode_worker, _FULL_WORKER_PAUSE_S)
            case Decode.EXCLUDE_WHILE_TAKEN:
                self._exclude_for(failed.decode_worker, self._slot_pause_s)
                self._slot_pause_s = min(_TAKEN_SLOT_PAUSE_MAX_S, 2 * self._slot_pause_s)
            case Decode.KEEP:
                pass

    def _exclude_for(self, worker: WorkerRef, pause_s: float) -> None:
        self._full_until_s[worker] = time.monotonic() + pause_s

    def _may_retry(self, retry: Retry, slot_wait_s: float) -> bool:
        """Pays for the retry."""
        if retry is Retry.FREE:
            return True
        if retry is Retry.FREE_WITHIN_WAIT:
            return self.wait_left_s > 0
        if retry is Retry.FREE_WITHIN_SLOT_WAIT:
            now_s = time.monotonic()
            self._slot_wanted_since_s = min(now_s, self._slot_wanted_since_s)
            return now_s < self._slot_wanted_since_s + slot_wait_s
        self._retries_left -= 1
        return retry is Retry.COSTS_ONE and self._retries_left >= 0
