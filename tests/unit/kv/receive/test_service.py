"""The addresses that a prefill rank's Hello and its stream name."""

from __future__ import annotations

import pytest

from headrace.kv.v1 import handoff_pb2
from headrace_common.errors import ProtocolViolation
from headrace_kv.receive.service import peer_addresses


def test_the_addresses_are_those_of_the_stream_and_of_the_hello() -> None:
    hello = handoff_pb2.Hello(transfer_addresses=["10.0.0.7", "::ffff:10.0.0.8"])
    found = peer_addresses(hello, "ipv6:[fd00::7]:51234")
    assert sorted(map(str, found)) == ["10.0.0.7", "10.0.0.8", "fd00::7"]
    assert sorted(map(str, peer_addresses(handoff_pb2.Hello(), "ipv6:[::1]:5"))) == [
        "127.0.0.1",
        "::1",
    ]


@pytest.mark.parametrize("named", [["10.0.0.0/8"], ["host"]])
def test_other_texts_end_the_stream(named: list[str]) -> None:
    hello = handoff_pb2.Hello(transfer_addresses=named)
    with pytest.raises(ProtocolViolation, match="transfer_addresses"):
        peer_addresses(hello, "ipv4:10.0.0.7:51234")
