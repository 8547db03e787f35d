"""The one tree of errors, and the gRPC status that each becomes.

HeadraceError
├── InvalidRequest          INVALID_ARGUMENT     a field of the request is wrong; names it
├── ConfigError             exit status 2        the process cannot start as configured; says the remedy
├── Unauthenticated         UNAUTHENTICATED      the caller's API key is missing or unknown
├── NotFound                NOT_FOUND
├── DuplicateTransfer       ALREADY_EXISTS       a transfer id was used before
├── StaleIncarnation        ABORTED              the message is meant for another incarnation
├── Conflict                ABORTED              somebody else changed it first
├── LayoutMismatch          FAILED_PRECONDITION  two KV layouts cannot talk; names the fields
├── ProtocolViolation       FAILED_PRECONDITION  a peer said something out of order
├── DecodeFull              RESOURCE_EXHAUSTED   no room on the decode worker; retry later
├── QueueFull               RESOURCE_EXHAUSTED   a bounded queue is full; retry later
├── NoDecodeWorker          UNAVAILABLE          nobody decodes this model
├── WorkerGone              UNAVAILABLE          a worker vanished under the request
├── Draining                UNAVAILABLE          the process is shutting down
├── RegistryUnavailable     UNAVAILABLE          the registry or its store cannot be reached
├── TransferFailed          UNAVAILABLE          KV bytes could not be moved
├── TransferTimeout         DEADLINE_EXCEEDED    KV bytes are missing; names them
├── KvCorrupt               DATA_LOSS            KV bytes landed, but not those that were sent; names them
├── DeadlineExceeded        DEADLINE_EXCEEDED    the request's own time is up
├── Cancelled               CANCELLED            somebody gave the request up
├── WatchExpired            OUT_OF_RANGE         the changes asked for are no longer kept
└── InternalError           INTERNAL             a bug in Headrace

`headrace_common.rpc.status` turns them into statuses and back.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import ClassVar

import grpc


class HeadraceError(Exception):
    """Something a caller can act on.

    Every variable part of `detail` is also in `metadata`, so that programs need not parse text (AIP-193).
    """

    reason: ClassVar[str] = "INTERNAL"
    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL
    retry_after_s: float | None = None

    def __init__(
        self,
        detail: str,
        *,
        metadata: Mapping[str, str] | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(detail)
        self.detail = detail
        self.metadata: dict[str, str] = dict(metadata or {})
        if retry_after_s is not None:
            self.retry_after_s = retry_after_s


class InvalidRequest(HeadraceError):
    """A field of the request is wrong. `violations` maps each field's path to its remedy."""

    reason = "INVALID_FIELD"
    code = grpc.StatusCode.INVALID_ARGUMENT

    def __init__(self, violations: Mapping[str, str]) -> None:
        self.violations = dict(violations)
        detail = "; ".join(f"{field}: {remedy}" for field, remedy in self.violations.items())
        super().__init__(detail, metadata=self.violations)


class ConfigError(HeadraceError):
    """The process cannot start as configured. The detail is one line that says what to do."""

    reason = "CONFIG_INVALID"
    code = grpc.StatusCode.FAILED_PRECONDITION


class Unauthenticated(HeadraceError):
    """The caller's API key is missing or unknown."""

    reason = "UNAUTHENTICATED"
    code = grpc.StatusCode.UNAUTHENTICATED


class NotFound(HeadraceError):
    """The thing asked for is not there."""

    reason = "NOT_FOUND"
    code = grpc.StatusCode.NOT_FOUND


class DuplicateTransfer(HeadraceError):
    """A transfer id was used before."""

    reason = "DUPLICATE_TRANSFER"
    code = grpc.StatusCode.ALREADY_EXISTS


class StaleIncarnation(HeadraceError):
    """The message is meant for another incarnation of this worker."""

    reason = "STALE_INCARNATION"
    code = grpc.StatusCode.ABORTED


class Conflict(HeadraceError):
    """Somebody else changed it first."""

    reason = "CONFLICT"
    code = grpc.StatusCode.ABORTED


class LayoutMismatch(HeadraceError):
    """Two KV layouts cannot talk. `metadata` maps each differing field to both values."""

    reason = "LAYOUT_MISMATCH"
    code = grpc.StatusCode.FAILED_PRECONDITION


class ProtocolViolation(HeadraceError):
    """A peer said something out of order."""

    reason = "PROTOCOL_VIOLATION"
    code = grpc.StatusCode.FAILED_PRECONDITION


class DecodeFull(HeadraceError):
    """The decode worker has no room for the prompt and its answer."""

    reason = "DECODE_FULL"
    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    retry_after_s = 0.5


class QueueFull(HeadraceError):
    """A bounded queue is full."""

    reason = "QUEUE_FULL"
    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    retry_after_s = 0.5


class NoDecodeWorker(HeadraceError):
    """No live decode worker serves the model."""

    reason = "NO_DECODE_WORKER"
    code = grpc.StatusCode.UNAVAILABLE
    retry_after_s = 1.0


class WorkerGone(HeadraceError):
    """A worker vanished under the request."""

    reason = "WORKER_GONE"
    code = grpc.StatusCode.UNAVAILABLE
    retry_after_s = 0.1


class Draining(HeadraceError):
    """The process is shutting down and takes nothing new."""

    reason = "DRAINING"
    code = grpc.StatusCode.UNAVAILABLE
    retry_after_s = 0.1


class RegistryUnavailable(HeadraceError):
    """The registry or its store cannot be reached."""

    reason = "REGISTRY_UNAVAILABLE"
    code = grpc.StatusCode.UNAVAILABLE
    retry_after_s = 1.0


class TransferFailed(HeadraceError):
    """KV bytes could not be moved."""

    reason = "TRANSFER_FAILED"
    code = grpc.StatusCode.UNAVAILABLE
    retry_after_s = 0.0


class TransferTimeout(HeadraceError):
    """KV bytes did not arrive in time; the detail names the missing (rank, layer) keys."""

    reason = "TRANSFER_TIMEOUT"
    code = grpc.StatusCode.DEADLINE_EXCEEDED


class KvCorrupt(HeadraceError):
    """KV bytes landed that are not those that were sent; the detail names the keys."""

    reason = "KV_CORRUPT"
    code = grpc.StatusCode.DATA_LOSS


class DeadlineExceeded(HeadraceError):
    """The request's own time is up."""

    reason = "DEADLINE_EXCEEDED"
    code = grpc.StatusCode.DEADLINE_EXCEEDED


class Cancelled(HeadraceError):
    """Somebody gave the request up."""

    reason = "CANCELLED"
    code = grpc.StatusCode.CANCELLED


class WatchExpired(HeadraceError):
    """The changes asked for are no longer kept: watch again from 0."""

    reason = "WATCH_EXPIRED"
    code = grpc.StatusCode.OUT_OF_RANGE


class InternalError(HeadraceError):
    """A bug in Headrace."""


def from_reason(
    reason: str,
    detail: str,
    *,
    metadata: Mapping[str, str] | None = None,
    default: type[HeadraceError] = InternalError,
) -> HeadraceError:
    """Rebuilds an error that crossed a process border as its reason and detail.

    An unknown reason gives a `default` whose detail starts with the reason. The violation of an
    InvalidRequest is reported for the field "request".
    """
    kind = class_of(reason)
    if kind is InvalidRequest:
        return InvalidRequest({"request": detail})
    if kind is None:
        return default(f"{reason}: {detail}" if reason else detail, metadata=metadata)
    return kind(detail, metadata=metadata)


def class_of(reason: str) -> type[HeadraceError] | None:
    """The class of the error tree with this reason, or None."""
    return _classes_by_reason().get(reason)


@cache
def _classes_by_reason() -> dict[str, type[HeadraceError]]:
    return {kind.reason: kind for kind in HeadraceError.__subclasses__()}
