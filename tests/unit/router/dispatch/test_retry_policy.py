"""Failures of attempts: which workers they exclude, and whether a retry follows."""

from __future__ import annotations

import math
from itertools import product

import pytest

from headrace_common.errors import (
    Cancelled,
    DeadlineExceeded,
    DecodeFull,
    Draining,
    HeadraceError,
    InternalError,
    InvalidRequest,
    KvCorrupt,
    LayoutMismatch,
    ProtocolViolation,
    QueueFull,
    StaleIncarnation,
    TransferFailed,
    TransferTimeout,
    WorkerGone,
)
from headrace_kv.layout import WorkerRef
from headrace_router.dispatch.retry_policy import FailedAttempt, RetryState

_CLOCK = "headrace_router.dispatch.retry_policy.time.monotonic"
_DECODE, _PREFILL = WorkerRef("d0", "1"), WorkerRef("p0", "1")

_NONE: frozenset[WorkerRef] = frozenset()


def _failed(error: type[HeadraceError], conditions: str = "") -> FailedAttempt:
    return FailedAttempt(
        InvalidRequest({"text": "x"}) if error is InvalidRequest else error("as scripted"),
        decode_worker=_DECODE,
        prefill_worker=_PREFILL,
        prefill_failed="prefill" in conditions,
        decode_generated="generated" in conditions,
    )


def _record(retries: RetryState, failed: FailedAttempt, conditions: str = "") -> bool:
    return retries.record_failure(
        failed, client_has_tokens="tokens" in conditions, time_left_s=10.0
    )


# Conditions: "prefill" side reported the error, decode "generated" a token, the client has "tokens".
@pytest.mark.parametrize(
    ("error", "conditions", "failed", "avoided", "cost"),
    [
        # The decode worker left: never again, for free.
        (Draining, "", {_DECODE}, _NONE, 0),
        (StaleIncarnation, "", {_DECODE}, _NONE, 0),
        (Draining, "prefill tokens", {_DECODE}, _NONE, 0),
        (StaleIncarnation, "generated tokens", {_DECODE}, _NONE, 0),
        # The decode worker is full.
        (DecodeFull, "generated tokens", {_DECODE}, _NONE, 1),
        (DecodeFull, "tokens", _NONE, _NONE, 0),
        # The prefill side failed.
        (Draining, "prefill", {_PREFILL}, _NONE, 1),
        (WorkerGone, "prefill", {_PREFILL}, _NONE, 1),
        (InternalError, "prefill tokens", {_PREFILL}, _NONE, 1),
        (QueueFull, "prefill", {_PREFILL}, _NONE, 1),
        (StaleIncarnation, "prefill", {_PREFILL}, {_DECODE}, 1),
        (Cancelled, "prefill", {_PREFILL}, {_DECODE}, 1),
        (TransferTimeout, "prefill", {_PREFILL}, {_DECODE}, 1),
        (LayoutMismatch, "prefill tokens", {_PREFILL}, {_DECODE}, 1),
        # The decode side reported a failure of the pair. After a generated token, prefill is not the cause.
        (TransferFailed, "", {_PREFILL}, {_DECODE}, 1),
        (TransferTimeout, "tokens", {_PREFILL}, {_DECODE}, 1),
        (ProtocolViolation, "", {_PREFILL}, {_DECODE}, 1),
        (TransferFailed, "generated tokens", _NONE, {_DECODE}, 1),
        (TransferTimeout, "generated tokens", _NONE, {_DECODE}, 1),
        # The decode worker was lost.
        (WorkerGone, "", _NONE, {_DECODE}, 1),
        (WorkerGone, "generated tokens", _NONE, {_DECODE}, 1),
    ],
)
def test_a_failure_excludes_workers_and_costs_retries(
    error: type[HeadraceError], conditions: str, failed: object, avoided: object, cost: int
) -> None:
    retries = RetryState(1, 10.0)
    assert _record(retries, _failed(error, conditions), conditions)
    assert (retries.failed, retries.avoided) == (failed, avoided)
    assert retries.last_error is not None
    # A budget of one pays for one more failure only if the first was free.
    assert _record(retries, _failed(WorkerGone)) is (cost == 0)


# Invalid requests, corrupt data, and other errors of the decode side.
@pytest.mark.parametrize(
    ("error", "conditions"),
    [
        *product([InvalidRequest, KvCorrupt], ["", "prefill", "generated tokens"]),
        *product([InternalError, DeadlineExceeded, QueueFull], ["", "generated tokens"]),
    ],
)
def test_some_failures_are_not_retried(error: type[HeadraceError], conditions: str) -> None:
    assert not _record(RetryState(9, 10.0), _failed(error, conditions), conditions)


def test_the_last_attempt_after_a_failed_prefill_is_local() -> None:
    retries = RetryState(2, 10.0)
    _record(retries, _failed(TransferFailed, "prefill"))
    assert retries.prefill_excluded
    assert not retries.local_only
    _record(retries, _failed(TransferFailed, "prefill"))
    assert retries.local_only


def test_the_last_attempt_after_a_lost_decode_worker_is_not_local() -> None:
    retries = RetryState(1, 10.0)
    assert _record(retries, _failed(WorkerGone))
    assert not retries.local_only


def test_a_full_worker_is_excluded_for_a_while_until_the_migration_wait_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 100.0
    monkeypatch.setattr(_CLOCK, lambda: now_s)
    retries = RetryState(0, 2.0)
    assert _record(retries, _failed(DecodeFull, "tokens"), "tokens")
    assert retries.excluded == {_DECODE}
    now_s = 100.4
    retries.readmit_full_workers()
    assert retries.excluded == {_DECODE}
    now_s = 100.6
    retries.readmit_full_workers()
    assert not retries.excluded
    now_s = 101.9
    assert _record(retries, _failed(DecodeFull, "tokens"), "tokens")
    now_s = 102.1
    assert not _record(retries, _failed(DecodeFull, "tokens"), "tokens")


def test_a_taken_slot_costs_no_retry_and_excludes_its_worker_for_a_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 100.0
    monkeypatch.setattr(_CLOCK, lambda: now_s)
    retries = RetryState(0, 2.0)
    failed = FailedAttempt(
        DecodeFull("slots", metadata={"resource": DecodeFull.SLOTS}), _DECODE, None, False, False
    )

    def record(slot_wait_s: float) -> bool:
        return retries.record_failure(
            failed, client_has_tokens=False, time_left_s=9.0, slot_wait_s=slot_wait_s
        )

    for pause_s in (0.02, 0.04, 0.08, 0.16, 0.32, 0.32):
        assert record(2.0)
        assert retries.excluded == {_DECODE}
        now_s += 0.9 * pause_s
        retries.readmit_full_workers()
        assert retries.full
        now_s += 0.2 * pause_s
        retries.readmit_full_workers()
        assert not retries.excluded
    now_s = 102.1
    assert not record(2.0)
    assert record(math.inf)


def test_a_generated_token_restarts_the_migration_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(_CLOCK, lambda: now_s)
    retries = RetryState(1, 2.0)
    _record(retries, _failed(DecodeFull, "tokens"), "tokens")
    now_s = 101.0
    _record(retries, _failed(WorkerGone, "generated tokens"), "generated tokens")
    assert retries.wait_left_s == 2.0


def test_workers_to_avoid_and_workers_that_left_are_remembered() -> None:
    retries = RetryState(1, 2.0, avoided={_DECODE})
    retries.exclude_worker(_PREFILL)
    assert retries.avoided == {_DECODE}
    assert retries.excluded == {_PREFILL}
