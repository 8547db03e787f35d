"""Attributes of the spans of servers."""

from __future__ import annotations

from headrace_common.rpc.trace_context import SERVED
from headrace_common.telemetry import schema


def server_attributes() -> dict[str, str]:
    """The call that the current task serves, by the conventions' names. Empty outside of calls."""
    call = SERVED.get()
    if call is None:
        return {}
    if call.http_method:
        return {
            schema.ATTRIBUTE_HTTP_METHOD: call.http_method,
            schema.ATTRIBUTE_HTTP_ROUTE: call.name,
        }
    return {schema.ATTRIBUTE_RPC_SYSTEM: "grpc", schema.ATTRIBUTE_RPC_METHOD: call.name}
