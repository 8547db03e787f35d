"""Errors in the form of the OpenAI API."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple, TypeAlias

import grpc
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from headrace_common.config import problem_text
from headrace_common.errors import VIOLATIONS_MAX, HeadraceError, InvalidRequest
from headrace_common.http.exchange import HttpError, HttpExchange
from headrace_common.rpc.status import reported_error

_STATUSES: Final[Mapping[grpc.StatusCode, int]] = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.ALREADY_EXISTS: 409,
    grpc.StatusCode.ABORTED: 409,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.CANCELLED: 499,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}
# OpenAI's words. Errors that OpenAI does not have keep their reason.
_CODES: Final[Mapping[grpc.StatusCode, str]] = {
    grpc.StatusCode.INVALID_ARGUMENT: "invalid_value",
    grpc.StatusCode.UNAUTHENTICATED: "invalid_api_key",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "rate_limit_exceeded",
    grpc.StatusCode.INTERNAL: "server_error",
}
_TYPES: Final[Mapping[int, str]] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
_UNSUPPORTED: Final = (
    *("/embeddings", "/rerank", "/score", "/classify", "/pooling", "/moderations"),
    *("/audio", "/images", "/realtime", "/fine_tuning", "/assistants"),
)
"""Beginnings of paths that servers of other kinds have."""
_NO_TEXT: Final = "must be a text"
# A remedy that a validator gives for one field.
_FIELD_REMEDY: Final = re.compile(r"([a-z_][a-z_.\d\[\]]*): (.*)", re.DOTALL)
# OpenAI's code for each kind of violation that pydantic has a word for. Others are invalid values.
_BODY_CODES: Final[Mapping[str, str]] = {
    "missing": "missing_required_parameter",
    **{
        f"{kind}_type": "invalid_type"
        for kind in ("string", "int", "float", "bool", "list", "dict")
    },
}


def unknown_path(path: str, routes: Iterable[str]) -> HttpError:
    """The error for a path that no route has."""
    if path.removeprefix("/v1").startswith(_UNSUPPORTED):
        return HttpError(
            404,
            "unsupported_endpoint",
            f"{path[:64]} is not served here: Headrace generates text; use a server of that kind beside it",
        )
    return HttpError(404, "unknown_path", f"use one of {', '.join(routes)}")


def status_of(error: HeadraceError | HttpError) -> int:
    """The HTTP status of an error. 404 for an unknown model, as OpenAI has it."""
    if isinstance(error, HttpError):
        return error.status
    if isinstance(error, InvalidRequest) and error.cause == "model_not_found":
        return 404
    return _STATUSES.get(error.code, 500)


def headers_of(error: HeadraceError | HttpError) -> dict[str, str]:
    """Headers of an error response, such as Retry-After, in whole seconds."""
    if isinstance(error, HttpError):
        return error.headers
    if error.retry_after_s is None:
        return {}
    return {"retry-after": str(max(1, round(error.retry_after_s)))}


def error_object(error: HeadraceError | HttpError) -> dict[str, Any]:
    """`{"error": ...}` with OpenAI's fields. `headrace` beside them has the reason and metadata of the gRPC status."""
    status = status_of(error)
    body: dict[str, Any] = {
        "message": str(error),
        "type": _TYPES.get(status, "server_error"),
        "param": None,
        "code": _code_of(error),
    }
    if isinstance(error, HeadraceError):
        body["message"] = error.detail
        body["headrace"] = {
            "reason": error.reason,
            "metadata": dict(list(error.metadata.items())[:VIOLATIONS_MAX]),
        }
    if isinstance(error, InvalidRequest):
        body["param"] = next(iter(error.violations), None)
    return {"error": body}


def _code_of(error: HeadraceError | HttpError) -> str:
    """A word for programs, as OpenAI has it."""
    if isinstance(error, HttpError):
        return error.code
    cause = error.cause if isinstance(error, InvalidRequest) else ""
    return cause or _CODES.get(error.code, error.reason.lower())


def error_bytes(error: HeadraceError | HttpError) -> bytes:
    """`error_object` as JSON."""
    return json.dumps(error_object(error)).encode()


AnyError: TypeAlias = HeadraceError | HttpError


class ErrorForm(NamedTuple):
    """How an API has errors: as a whole response, and as the last event of a stream."""

    whole: Callable[[AnyError], bytes]
    event: Callable[[AnyError], bytes]


OPENAI_ERRORS: Final = ErrorForm(error_bytes, lambda error: b"data: %b\n\n" % error_bytes(error))


async def serve(
    exchange: HttpExchange, serving: Awaitable[None], errors: ErrorForm = OPENAI_ERRORS
) -> None:
    """Awaits what serves the request. Its error becomes the response, or the last event of a started stream."""
    try:
        await serving
    except Exception as error:  # noqa: BLE001 - the outermost frame of a request
        await respond_error(exchange, error, errors)


async def respond_error(exchange: HttpExchange, error: Exception, errors: ErrorForm) -> None:
    """The error is the response, or the last event of a started stream.

    It refers to the caller's frame and to the request's body. A variable for it there would keep both in memory.
    """
    shown = error if isinstance(error, HttpError) else reported_error(error, exchange.path)
    if exchange.started:
        await exchange.finish(errors.event(shown))
    else:
        await exchange.respond(status_of(shown), errors.whole(shown), headers_of(shown))


def invalid_body(error: ValidationError) -> InvalidRequest:
    """The error for a body that names its wrong fields."""
    items = error.errors(include_url=False, include_input=False)
    items = items[:VIOLATIONS_MAX]
    kinds = {_BODY_CODES.get(item["type"], "") for item in items}
    return InvalidRequest(_violations(items), cause=kinds.pop() if len(kinds) == 1 else "")


def _violations(items: Iterable[ErrorDetails]) -> dict[str, str]:
    violations: dict[str, str] = {}
    for item in items:
        message = problem_text(item)
        path = _path(item["loc"])
        named = _FIELD_REMEDY.fullmatch(message) if item["type"] == "value_error" else None
        if named is not None:
            path, message = f"{path}.{named[1]}" if path else named[1], named[2]
        # The members of a union have a violation each.
        name = path or "body"
        violations[name] = f"{violations[name]}, or: {message}" if name in violations else message
    # Where a part of a list is wrong, a text was only the alternative to the list.
    return {
        name: message
        for name, message in violations.items()
        if message != _NO_TEXT or not any(other.startswith(f"{name}[") for other in violations)
    }


def _path(location: tuple[int | str, ...]) -> str:
    """A field's path such as messages[0].content. Drops the names that pydantic adds for the members of a union."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier():
            # The names of our own classes, too, are not of the client's body.
            if path and (part in ("str", "int", "dict") or part[0].isupper()):
                continue
            path += f".{part}" if path else part
    return path
