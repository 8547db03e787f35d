"""The remedies of failed calls."""

from __future__ import annotations

import pytest

from headrace_cli.output import with_remedy

REFUSED = "the router on 127.0.0.1:7050 does not answer (failed to connect: {})"


@pytest.mark.parametrize(
    ("message", "remedy"),
    [
        (REFUSED.format("Trying to connect an http1.x server"), "the port for gRPC"),
        (REFUSED.format("SSL_ERROR_SSL: WRONG_VERSION_NUMBER: OK"), "it has no TLS"),
        (REFUSED.format("CERTIFICATE_VERIFY_FAILED: self-signed"), "HEADRACE_TLS_AUTHORITY_FILE"),
        (REFUSED.format("Hostname Verification Check failed."), "its certificate has"),
        (REFUSED.format("Socket closed"), "HEADRACE_TLS_AUTHORITY_FILE"),
        ("errors resolving nohost:7050", "check the name"),
        ("Method not found!", "--router"),
        (
            "the API key is not known here; send yours as metadata 'x-api-key: KEY'",
            "HEADRACE_API_KEY",
        ),
        ("an API key is required; send yours as metadata 'x-api-key: KEY'", "HEADRACE_API_KEY"),
    ],
)
def test_a_failed_call_names_what_the_user_of_a_command_can_do(message: str, remedy: str) -> None:
    line = with_remedy(message)
    assert remedy in line.partition("; ")[2]
    assert "metadata" not in line
