"""What Mooncake writes to stderr when it starts."""

from __future__ import annotations

import os

import pytest

from headrace_kv.transport.mooncake import without_known_lines

KNOWN = (
    b"WARNING: Logging before InitGoogleLogging() is written to STDERR\n"
    b"E1122 19:26:07.147118  3936 transfer_metadata.cpp:1098] Local segment descriptor not found\n"
)
OTHER = b"E1122 19:26:07.147118  3936 tcp_transport.cpp:98] bind: Address already in use\n"


def test_other_output_is_kept_in_order_and_later_output_is_not_delayed(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def fail() -> None:
        with without_known_lines():
            os.write(2, b"first\n" + KNOWN)
            os.write(2, OTHER)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert capfd.readouterr().err == f"first\n{OTHER.decode()}"
    os.write(2, b"later\n")
    assert capfd.readouterr().err == "later\n"
