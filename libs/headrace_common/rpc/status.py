"""Converts errors to gRPC statuses on the server, also of malformed messages, and back to errors on the client."""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any

import grpc
import grpc.aio
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from headrace_common import errors
from headrace_common.durations import duration_from_seconds, seconds_from_duration
from headrace_common.errors import HeadraceError, InternalError, InvalidRequest
from headrace_common.rpc.handlers import Context, Handler, WrappingInterceptor, guarded
from headrace_common.rpc.wire_fields import MalformedMessage, fields_of

_DEPTH_MAX = 32
# Errors that led to an error. Few have more than three.
_CAUSES_MAX = 16
# The search runs on the event loop.
_FIELDS_MAX = 256


def invalid_text_fields(data: bytes, message_type: Descriptor) -> list[str]:
    """Paths of the string fields of `data` that are not UTF-8, such as "chat.messages[1].content".

    Searches the first fields only. Empty when none of these is such a field, or when they are malformed in another way.
    """
    try:
        return list(_search(data, 0, len(data), message_type, "", 0, iter(range(_FIELDS_MAX))))
    except MalformedMessage:
        return []


def _search(
    data: bytes,
    start: int,
    end: int,
    message_type: Descriptor,
    prefix: str,
    depth: int,
    budget: Iterator[int],
) -> Iterator[str]:
    """Takes one from `budget` for each field, and ends with it."""
    if depth == _DEPTH_MAX:
        return
    occurrences: dict[int, int] = {}
    for _, (number, content, value_end) in zip(budget, fields_of(data, start, end), strict=False):
        field = message_type.fields_by_number.get(number)
        if field is None or content is None:
            continue
        index = occurrences.get(number, 0)
        occurrences[number] = index + 1
        path = f"{prefix}{field.name}" + (f"[{index}]" if field.is_repeated else "")
        if field.type == FieldDescriptor.TYPE_STRING:
            if not _is_utf8(data[content:value_end]):
                yield path
        elif field.message_type is not None:
            yield from _search(
                data, content, value_end, field.message_type, f"{path}.", depth + 1, budget
            )


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


_LOG = logging.getLogger(__name__)

DOMAIN = "headrace"
_DETAILS_KEY = "grpc-status-details-bin"
# gRPC clients with a retry policy wait for so many milliseconds before they try again.
_PUSHBACK_KEY = "grpc-retry-pushback-ms"
# HTTP/2 trailers carry the status, with the detail twice. gRPC clients limit them to 8 KiB by default.
_DETAIL_BYTES_MAX = 1_024
_VALUE_BYTES_MAX = 512
_VALUES_BYTES_MAX = 1_536

_WITHOUT_DETAILS: Mapping[grpc.StatusCode, type[HeadraceError]] = {
    grpc.StatusCode.UNAVAILABLE: errors.WorkerGone,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
    grpc.StatusCode.CANCELLED: errors.Cancelled,
    grpc.StatusCode.UNAUTHENTICATED: errors.Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: errors.PermissionDenied,
    grpc.StatusCode.NOT_FOUND: errors.NotFound,
    grpc.StatusCode.ALREADY_EXISTS: errors.DuplicateTransfer,
    grpc.StatusCode.ABORTED: errors.Conflict,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.QueueFull,
    grpc.StatusCode.FAILED_PRECONDITION: errors.ProtocolViolation,
    grpc.StatusCode.UNIMPLEMENTED: errors.ProtocolViolation,
    grpc.StatusCode.OUT_OF_RANGE: errors.WatchExpired,
}


def status_of(error: HeadraceError) -> status_pb2.Status:
    """The google.rpc.Status of an error: ErrorInfo, and BadRequest or RetryInfo if they apply."""
    # Sent on, it has details, and its receiver must not think that this service does not answer.
    metadata = _bounded_values({k: v for k, v in error.metadata.items() if k != "grpc_code"})
    status = status_pb2.Status(
        code=error.code.value[0], message=_bounded(error.detail, _DETAIL_BYTES_MAX)
    )
    status.details.add().Pack(
        error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata)
    )
    if isinstance(error, InvalidRequest):
        bad_request = error_details_pb2.BadRequest()
        for field, remedy in _bounded_values(error.violations).items():
            bad_request.field_violations.add(field=field, description=remedy)
        status.details.add().Pack(bad_request)
    if error.retry_after_s is not None:
        delay = duration_from_seconds(error.retry_after_s)
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return status


def error_from_rpc(exc: grpc.RpcError) -> HeadraceError:
    """The error that the server raised. Without Headrace's details, the error nearest to the status."""
    code, detail, trailers = _parts_of(exc)
    status = _rich_status(trailers)
    error = _error_with_details(status) if status is not None else None
    return error or _error_without_details(code, detail)


def rpc_error_of(error: HeadraceError) -> grpc.aio.AioRpcError:
    """The inverse of error_from_rpc, for a call that its client ends."""
    code, detail, trailers = _status_to_send(error)
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailers), detail)


def error_from_status(data: bytes) -> HeadraceError:
    """The error of a serialized google.rpc.Status. InternalError where it is none of Headrace's."""
    try:
        status = status_pb2.Status.FromString(data)
    except DecodeError:
        return InternalError("the status of an error cannot be parsed")
    return _error_with_details(status) or InternalError(status.message or "no reason was given")


def _error_with_details(status: status_pb2.Status) -> HeadraceError | None:
    """None when the details are not Headrace's."""
    info, bad_request, retry = (
        error_details_pb2.ErrorInfo(),
        error_details_pb2.BadRequest(),
        error_details_pb2.RetryInfo(),
    )
    for packed in status.details:
        for message in (info, bad_request, retry):
            packed.Unpack(message)
    kind = errors.class_of(info.reason) if info.domain == DOMAIN else None
    if kind is None:
        return None
    retry_after_s = (
        seconds_from_duration(retry.retry_delay) if retry.HasField("retry_delay") else None
    )
    if kind is InvalidRequest:
        violations = {v.field: v.description for v in bad_request.field_violations}
        return InvalidRequest(violations, retry_after_s=retry_after_s)
    return kind(status.message, metadata=info.metadata, retry_after_s=retry_after_s)


class ErrorInterceptor(WrappingInterceptor):
    """Ends an RPC with the status of the error that its handler raised.

    A request that cannot be parsed becomes InvalidRequest, if the handler gets it as an argument or by
    `async for`. Any other exception is a bug and becomes INTERNAL with an id. The log has the
    traceback with the same id.
    """

    def wrap(self, handler: Handler, method: str) -> Handler:
        deserialize = handler.request_deserializer
        parse = parser(deserialize, method) if deserialize is not None else None
        return guarded(handler, lambda context: _Reporting(method, context), parse)


class _Reporting:
    """Ends the RPC with the status of the block's error.

    gRPC's call keeps the error that ends it, and its frames refer to the call. So these must not refer to the request,
    which would stay in memory until a garbage collection.
    """

    def __init__(self, method: str, context: Context) -> None:
        self._method, self._context = method, context

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(
        self, kind: object, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not isinstance(error, Exception) or isinstance(error, grpc.aio.AbortError):
            return
        code, detail, trailers = _status_to_send(reported_error(error, self._method))
        del error, traceback
        await self._context.abort(code, detail, trailers)


def _forget_frames(error: BaseException | None) -> None:
    for _ in range(_CAUSES_MAX):
        if error is not None:
            error.with_traceback(None)
            error = error.__cause__ or error.__context__


def reported_error(error: Exception, method: str) -> HeadraceError:
    """The error to send for one that a handler raised. A bug becomes InternalError, with an id and in the log.

    Frees what the handler's functions had in memory, such as images: they and the error may refer to each other.
    """
    try:
        return _logged(error, method)
    finally:
        _forget_frames(error)


def _logged(error: Exception, method: str) -> HeadraceError:
    if isinstance(error, HeadraceError):
        if error.code is grpc.StatusCode.INTERNAL:
            _LOG.error("%s failed: %s", method, error.detail, exc_info=error)
        return error
    error_id = secrets.token_hex(4)
    _LOG.error("%s failed, error %s", method, error_id, exc_info=error)
    detail = f"a bug in Headrace; the log of this process has error {error_id}"
    return InternalError(detail, metadata={"error_id": error_id, "exception": type(error).__name__})


def _status_to_send(error: HeadraceError) -> tuple[grpc.StatusCode, str, Any]:
    status = rpc_status.to_status(status_of(error))
    trailers = status.trailing_metadata
    if error.retry_after_s is not None:
        trailers = (*trailers, (_PUSHBACK_KEY, str(max(1, round(1e3 * error.retry_after_s)))))
    return error.code, status.details, trailers


def parser(deserialize: Callable[[bytes], Any], method: str) -> Callable[[bytes], Any]:
    """As `deserialize`, but it raises InvalidRequest for data that protobuf cannot parse."""

    def parse(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError as error:
            raise _violations_of(data, method, error) from error

    return parse


def _violations_of(data: bytes, method: str, error: DecodeError) -> InvalidRequest:
    request_type = _request_type(method)
    fields = invalid_text_fields(data, request_type) if request_type is not None else []
    if fields:
        return InvalidRequest(dict.fromkeys(fields[:16], "is not valid UTF-8; send text as UTF-8"))
    return InvalidRequest(
        {"request": f"cannot be parsed ({error}); send the message type of {method}"}
    )


def _request_type(method: str) -> Descriptor | None:
    service, _, name = method.strip("/").rpartition("/")
    try:
        methods = descriptor_pool.Default().FindServiceByName(service).methods_by_name
    except KeyError:
        return None
    return methods[name].input_type if name in methods else None


def _parts_of(exc: grpc.RpcError) -> tuple[grpc.StatusCode, str, Any]:
    # A blocking client raises an error that is also a grpc.Call. AioRpcError has the same methods.
    if isinstance(exc, grpc.aio.AioRpcError | grpc.Call):
        return exc.code(), exc.details() or "", exc.trailing_metadata() or ()
    return grpc.StatusCode.UNKNOWN, str(exc), ()


def _rich_status(trailers: Any) -> status_pb2.Status | None:
    for key, value in trailers:
        if key == _DETAILS_KEY:
            with contextlib.suppress(DecodeError):
                return status_pb2.Status.FromString(value)
    return None


def _error_without_details(code: grpc.StatusCode, detail: str) -> HeadraceError:
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return InvalidRequest({"request": detail})
    kind = _WITHOUT_DETAILS.get(code, InternalError)
    return kind(detail or code_pb2.Code.Name(code.value[0]), metadata={"grpc_code": code.name})


def _bounded(text: str, bytes_max: int) -> str:
    encoded = text.encode("utf-8", "replace")
    if len(encoded) > bytes_max:
        return encoded[: bytes_max - 3].decode("utf-8", "ignore") + "..."
    return encoded.decode()


def _bounded_values(values: Mapping[str, str]) -> dict[str, str]:
    bounded: dict[str, str] = {}
    room_bytes = _VALUES_BYTES_MAX
    for key, value in values.items():
        short_key, short_value = _bounded(key, 128), _bounded(str(value), _VALUE_BYTES_MAX)
        room_bytes -= len(short_key.encode()) + len(short_value.encode())
        if room_bytes < 0:
            break
        bounded[short_key] = short_value
    return bounded
