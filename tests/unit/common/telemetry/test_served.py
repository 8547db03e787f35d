"""The attributes of servers' spans."""

from __future__ import annotations

from contextvars import copy_context

import pytest

from headrace_common.rpc.trace_context import SERVED, ServedCall
from headrace_common.telemetry import schema
from headrace_common.telemetry.served import server_attributes


@pytest.mark.parametrize(
    "call, attributes",
    [
        (None, {}),
        (
            ServedCall("package.Service/Method"),
            {
                schema.ATTRIBUTE_RPC_SYSTEM: "grpc",
                schema.ATTRIBUTE_RPC_METHOD: "package.Service/Method",
            },
        ),
        (
            ServedCall("/v1/completions", "POST"),
            {
                schema.ATTRIBUTE_HTTP_METHOD: "POST",
                schema.ATTRIBUTE_HTTP_ROUTE: "/v1/completions",
            },
        ),
    ],
)
def test_a_call_has_the_names_of_its_protocol(
    call: ServedCall | None, attributes: dict[str, str]
) -> None:
    def served() -> dict[str, str]:
        SERVED.set(call)
        return server_attributes()

    assert copy_context().run(served) == attributes
