"""Promises to keep the KV of an answer, as clients and workers name them. Pure."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Awaitable, Callable, Sequence
from copy import deepcopy
from typing import Any, Final, TypeAlias

from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import inference_pb2, keep_pb2
from headrace_common.deadlines import Deadline
from headrace_common.durations import duration_from_seconds, seconds_from_duration
from headrace_common.errors import InvalidRequest, NotFound
from headrace_common.limits import KEEP_MAX_S

Keep: TypeAlias = Callable[[str, inference_pb2.KeepRequest, Deadline], Awaitable[keep_pb2.Kept]]
"""Renews or ends a promise to a tenant, see InferenceService.Keep."""

KEEP_HEADER: Final = "x-headrace-keep"
"""With the seconds that a client asks for, in requests over HTTP."""
KEPT_FIELD: Final = "headrace_kept"
"""With the promise, in the usage of answers over HTTP."""

# An incarnation and a transfer id, see headrace_common.identity.
_ID = re.compile(r"([0-9a-f]{16})(x[0-9a-f]{32})")
_TTL = re.compile(r"([0-9]{1,9})([smhd])")
_UNITS_S = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}


def terms_to_proto(tenant: str, seconds: float) -> decode_pb2.Keep:
    """What a worker gets. Tenants' names do not leave the router."""
    owner = hashlib.blake2b(tenant.encode(), digest_size=16).hexdigest()
    return decode_pb2.Keep(duration=duration_from_seconds(seconds), owner=owner)


def kept_of(promise: keep_pb2.Kept, incarnation: str, transfer_id: str) -> keep_pb2.Kept:
    """A worker's promise with its id for clients. The id has the place, so any router can find the promise by it."""
    kept = deepcopy(promise)
    if kept.tokens:
        kept.id = incarnation + transfer_id
    return kept


def worker_request(tenant: str, request: inference_pb2.KeepRequest) -> decode_pb2.KeepRequest:
    """The request to the worker that the id names. Raises InvalidRequest, or NotFound for what cannot be an id."""
    seconds = seconds_from_duration(request.duration)
    if not 0 <= seconds <= KEEP_MAX_S:
        raise InvalidRequest({"duration": f"must be 0 s to {KEEP_MAX_S} s"})
    found = _ID.fullmatch(request.id)
    if found is None:
        raise no_promise()
    incarnation, transfer_id = found.groups()
    return decode_pb2.KeepRequest(
        transfer_id=transfer_id, incarnation=incarnation, keep=terms_to_proto(tenant, seconds)
    )


def no_promise() -> NotFound:
    """The error for a promise that is not in force."""
    return NotFound(
        "there is no such promise: it has ended, or its worker; send the conversation as usual"
    )


def ttl_s(text: Any) -> float:
    """The seconds of a time such as "5m", an hour at most. 0 for another value."""
    found = _TTL.fullmatch(text) if isinstance(text, str) else None
    return min(KEEP_MAX_S, float(found[1]) * _UNITS_S[found[2]]) if found is not None else 0.0


def ask_to_keep(
    header: str | None, keep_s: float, requests: Sequence[inference_pb2.GenerateRequest]
) -> None:
    """Asks for a promise in the one request of a client with this header. Raises InvalidRequest.

    Without a header, the fields of the API ask for `keep_s`. Such a request for several answers gets no promise.
    """
    first = requests[0]
    if header is None:
        if keep_s > 0 and len(requests) == 1 and max(first.n, first.best_of) <= 1:
            first.keep.CopyFrom(duration_from_seconds(keep_s))
        return
    if len(requests) > 1:
        raise InvalidRequest({KEEP_HEADER: "excludes several prompts; send one"})
    try:
        seconds = float(header)
        first.keep.CopyFrom(duration_from_seconds(seconds))
    except (ValueError, OverflowError):
        raise InvalidRequest({KEEP_HEADER: "must be a number of seconds"}) from None


def kept_field(usage: inference_pb2.Usage) -> dict[str, Any]:
    """The promise of a usage that has one, as a field of the usage over HTTP."""
    return {KEPT_FIELD: kept_object(usage.kept)} if usage.HasField("kept") else {}


def kept_object(kept: keep_pb2.Kept) -> dict[str, Any]:
    """A promise in answers over HTTP."""
    if not kept.tokens:
        return {"tokens": 0, "reason": kept.reason}
    seconds = seconds_from_duration(kept.duration)
    return {"id": kept.id, "tokens": kept.tokens, "tier": kept.tier, "seconds": seconds}
