"""The tree of errors, with the gRPC status of each.

HeadraceError
├── InvalidRequest      | INVALID_ARGUMENT    | a field of the request is wrong; names it
├── ConfigError         | exit status 2       | the process cannot start as configured; names the remedy
├── Unauthenticated     | UNAUTHENTICATED     | the caller's API key, token or ticket is missing or invalid
├── PermissionDenied    | PERMISSION_DENIED   | the caller's role may not do this; names the roles that may
├── NotFound            | NOT_FOUND           | the requested record does not exist
├── DuplicateTransfer   | ALREADY_EXISTS      | a transfer id was used before
├── StaleIncarnation    | ABORTED             | the message is for another incarnation
├── Conflict            | ABORTED             | another writer changed the record first
├── LayoutMismatch      | FAILED_PRECONDITION | two KV layouts are incompatible; names the fields
├── ProtocolViolation   | FAILED_PRECONDITION | a peer sent a message out of order
├── DecodeFull          | RESOURCE_EXHAUSTED  | no room on the decode worker; retry later
├── QueueFull           | RESOURCE_EXHAUSTED  | a bounded queue is full; retry later
├── FirstTokenLate      | RESOURCE_EXHAUSTED  | the first token is predicted to come too late; retry later
├── NoDecodeWorker      | UNAVAILABLE         | no live decode worker serves the model
├── WorkerGone          | UNAVAILABLE         | a worker failed or cannot be reached
├── Draining            | UNAVAILABLE         | the process is shutting down
├── RegistryUnavailable | UNAVAILABLE         | the registry or its store cannot be reached
├── TransferFailed      | UNAVAILABLE         | KV bytes could not be moved
├── TransferTimeout     | DEADLINE_EXCEEDED   | KV bytes did not arrive in time; names them
├── KvCorrupt           | DATA_LOSS           | the KV bytes received differ from those sent; names them
├── DeadlineExceeded    | DEADLINE_EXCEEDED   | the request's deadline has passed
├── Cancelled           | CANCELLED           | the request was cancelled
├── WatchExpired        | OUT_OF_RANGE        | the requested changes are no longer kept
└── InternalError       | INTERNAL            | a bug in Headrace

`headrace_common.rpc.status` converts errors to statuses and back.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from itertools import islice
from typing import ClassVar, Final, TypeAlias

import grpc

_Code: TypeAlias = grpc.StatusCode
VIOLATIONS_MAX: Final = 16
"""Most wrong fields that an error names."""


class HeadraceError(Exception):
    """An error that a caller can handle.

    `metadata` has every variable part of `detail`, so that programs need not parse text (AIP-193).
    """

    reason: ClassVar[str] = "INTERNAL"
    code: ClassVar[grpc.StatusCode] = _Code.INTERNAL
    retry_after_s: float | None = None

    def __init_subclass__(
        cls, reason: str = reason, code: _Code = code, retry_after_s: float | None = None
    ) -> None:
        cls.reason, cls.code, cls.retry_after_s = reason, code, retry_after_s

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

    def add_metadata(self, **values: str) -> None:
        """Adds to `metadata`. Replaces a value that has the same key."""
        self.metadata.update(values)


class InvalidRequest(HeadraceError, reason="INVALID_FIELD", code=_Code.INVALID_ARGUMENT):
    """A field of the request is wrong. `violations` maps each field's path to its remedy, for VIOLATIONS_MAX fields.

    `cause` is the word that OpenAI has for it, such as "model_not_found". It stays within the process.
    """

    def __init__(
        self,
        violations: Mapping[str, str],
        *,
        cause: str = "",
        retry_after_s: float | None = None,
    ) -> None:
        self.violations = dict(islice(violations.items(), VIOLATIONS_MAX))
        self.cause = cause
        detail = "; ".join(f"{field}: {remedy}" for field, remedy in self.violations.items())
        super().__init__(detail, metadata=self.violations, retry_after_s=retry_after_s)


class ConfigError(HeadraceError, reason="CONFIG_INVALID", code=_Code.FAILED_PRECONDITION):
    """The process cannot start as configured. The detail is one line with the remedy."""


class Unauthenticated(HeadraceError, reason="UNAUTHENTICATED", code=_Code.UNAUTHENTICATED):
    """The caller's API key, role token or ticket is missing or invalid."""


class PermissionDenied(HeadraceError, reason="PERMISSION_DENIED", code=_Code.PERMISSION_DENIED):
    """The caller is known, but its role may not do this."""


class NotFound(HeadraceError, reason="NOT_FOUND", code=_Code.NOT_FOUND):
    """The requested record does not exist."""


class DuplicateTransfer(HeadraceError, reason="DUPLICATE_TRANSFER", code=_Code.ALREADY_EXISTS):
    """A transfer id was used before."""


class StaleIncarnation(HeadraceError, reason="STALE_INCARNATION", code=_Code.ABORTED):
    """The message is for another incarnation of this worker."""


class Conflict(HeadraceError, reason="CONFLICT", code=_Code.ABORTED):
    """Another writer changed the record first."""


class LayoutMismatch(HeadraceError, reason="LAYOUT_MISMATCH", code=_Code.FAILED_PRECONDITION):
    """Two KV layouts are incompatible. `metadata` maps each differing field to both values."""


class ProtocolViolation(HeadraceError, reason="PROTOCOL_VIOLATION", code=_Code.FAILED_PRECONDITION):
    """A peer sent a message out of order."""


class DecodeFull(
    HeadraceError, reason="DECODE_FULL", code=_Code.RESOURCE_EXHAUSTED, retry_after_s=0.5
):
    """The decode worker has no room for the prompt and its answer. Its metadata names the `resource`."""

    SLOTS = "slots"
    BLOCKS = "blocks"

    @property
    def needs_blocks(self) -> bool:
        """Whether KV blocks were missing, not a slot."""
        return self.metadata.get("resource") == self.BLOCKS


class QueueFull(
    HeadraceError, reason="QUEUE_FULL", code=_Code.RESOURCE_EXHAUSTED, retry_after_s=0.5
):
    """A bounded queue is full."""


class FirstTokenLate(HeadraceError, reason="FIRST_TOKEN_LATE", code=_Code.RESOURCE_EXHAUSTED):
    """The first token is predicted to come after the request's deadline or target. No work was done for it."""


class NoDecodeWorker(
    HeadraceError, reason="NO_DECODE_WORKER", code=_Code.UNAVAILABLE, retry_after_s=1.0
):
    """No live decode worker serves the model."""


class WorkerGone(HeadraceError, reason="WORKER_GONE", code=_Code.UNAVAILABLE, retry_after_s=0.1):
    """A worker failed during the request, or cannot be reached."""


class Draining(HeadraceError, reason="DRAINING", code=_Code.UNAVAILABLE, retry_after_s=0.1):
    """The process is shutting down and rejects new requests."""


class RegistryUnavailable(
    HeadraceError, reason="REGISTRY_UNAVAILABLE", code=_Code.UNAVAILABLE, retry_after_s=1.0
):
    """The registry or its store cannot be reached."""


class TransferFailed(
    HeadraceError, reason="TRANSFER_FAILED", code=_Code.UNAVAILABLE, retry_after_s=0.0
):
    """KV bytes could not be moved."""


class TransferTimeout(HeadraceError, reason="TRANSFER_TIMEOUT", code=_Code.DEADLINE_EXCEEDED):
    """KV bytes did not arrive in time. The detail names the missing (rank, layer) keys."""


class KvCorrupt(HeadraceError, reason="KV_CORRUPT", code=_Code.DATA_LOSS):
    """The KV bytes received differ from those sent. The detail names the (rank, layer) keys."""


class DeadlineExceeded(HeadraceError, reason="DEADLINE_EXCEEDED", code=_Code.DEADLINE_EXCEEDED):
    """The request's deadline has passed."""

    @classmethod
    def waiting_for(cls, what: str) -> DeadlineExceeded:
        """It has passed while the request waited for `what`."""
        detail = f"the deadline passed while waiting for {what}"
        return cls(detail, metadata={"waited_for": what})


class Cancelled(HeadraceError, reason="CANCELLED", code=_Code.CANCELLED):
    """The request was cancelled."""


class WatchExpired(HeadraceError, reason="WATCH_EXPIRED", code=_Code.OUT_OF_RANGE):
    """The requested changes are no longer kept. The caller watches again from 0."""


class InternalError(HeadraceError):
    """A bug in Headrace."""


def from_reason(
    reason: str,
    detail: str,
    *,
    metadata: Mapping[str, str] | None = None,
    default: type[HeadraceError] = InternalError,
) -> HeadraceError:
    """Rebuilds an error from the reason and detail that another process sent.

    An unknown reason gives a `default` with a detail that starts with the reason. An InvalidRequest has
    one violation, of the field "request".
    """
    kind = class_of(reason)
    if kind is InvalidRequest:
        return InvalidRequest({"request": detail})
    if kind is None:
        return default(f"{reason}: {detail}" if reason else detail, metadata=metadata)
    return kind(detail, metadata=metadata)


def class_of(reason: str) -> type[HeadraceError] | None:
    """The error class with this reason, or None."""
    return _classes_by_reason().get(reason)


@cache
def _classes_by_reason() -> dict[str, type[HeadraceError]]:
    return {kind.reason: kind for kind in HeadraceError.__subclasses__()}
