"""What Mooncake writes to stderr when it starts."""

from __future__ import annotations

import os

import pytest

from headrace_kv.transport.mooncake.known_lines import wanted_lines, without_known_lines
from headrace_kv.transport.mooncake.transport import MooncakeTransport

KNOWN = (
    b"WARNING: Logging before InitGoogleLogging() is written to STDERR\n"
    b"E1122 19:26:07.147118  3936 transfer_metadata.cpp:1098] Local segment descriptor not found\n"
)
OTHER = b"E1122 19:26:07.147118  3936 tcp_transport.cpp:98] bind: Address already in use\n"


def test_a_healthy_start_writes_no_error(capfd: pytest.CaptureFixture[str]) -> None:
    transport = MooncakeTransport("127.0.0.1", "tcp")
    try:
        assert transport.session
    finally:
        transport.close()
    assert capfd.readouterr().err == ""


def test_only_the_known_lines_are_dropped() -> None:
    assert wanted_lines(KNOWN + OTHER + b"no end") == OTHER + b"no end"
    assert wanted_lines(OTHER.replace(b"bind", b"Local segment descriptor not found")) != b""


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
