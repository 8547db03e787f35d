"""The hosts that a decode worker's transport admits."""

from __future__ import annotations

import asyncio
import ipaddress

import pytest

from headrace_common.errors import ConfigError, InternalError
from headrace_engine.worker import transfer_peers
from headrace_engine.worker.transfer_peers import TransferPeers
from headrace_kv.transport.guard import Networks, parse_networks
from tests.waiting import until

ONE, OTHER = (frozenset({ipaddress.ip_address(text)}) for text in ("10.0.0.7", "10.0.0.9"))
ALWAYS = parse_networks(["192.168.0.0/24"])


class Transport:
    """Records the networks that it admits. `turn` holds an update back while it is cleared."""

    def __init__(self) -> None:
        self.networks = ALWAYS
        self.updates = 0
        self.turn = asyncio.Event()
        self.turn.set()
        self.error: Exception | None = None

    async def admit(self, networks: Networks) -> None:
        self.updates += 1
        await self.turn.wait()
        if self.error is not None:
            raise self.error
        self.networks = networks

    @property
    def admitted(self) -> list[str]:
        return [str(network) for network in self.networks]


@pytest.fixture
async def transport() -> Transport:
    return Transport()


async def test_a_host_is_admitted_while_it_has_a_stream(transport: Transport) -> None:
    peers = TransferPeers(transport.admit, ALWAYS, linger_s=0.05)
    async with peers.admitted(ONE):
        assert transport.admitted == ["10.0.0.7/32", "192.168.0.0/24"]
        async with peers.admitted(ONE), peers.admitted(OTHER):
            assert transport.admitted == ["10.0.0.7/32", "10.0.0.9/32", "192.168.0.0/24"]
        await until(lambda: transport.admitted == ["10.0.0.7/32", "192.168.0.0/24"])
    assert transport.admitted == ["10.0.0.7/32", "192.168.0.0/24"]
    await until(lambda: transport.admitted == ["192.168.0.0/24"])
    await peers.close()


async def test_a_stream_that_returns_in_time_changes_nothing(transport: Transport) -> None:
    peers = TransferPeers(transport.admit, (), linger_s=60.0)
    for _ in range(3):
        async with peers.admitted(ONE):
            pass
    assert transport.updates == 1
    assert transport.admitted == ["10.0.0.7/32"]
    await peers.close()


async def test_a_transport_that_refuses_fails_the_stream(
    transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers = TransferPeers(transport.admit, (), linger_s=0.0)
    transport.error = ConfigError("the kernel refused")
    with pytest.raises(ConfigError, match="the kernel refused"):
        async with peers.admitted(ONE):
            pytest.fail("a host was let in that the transport does not admit")
    transport.error = None
    transport.turn.clear()
    monkeypatch.setattr(transfer_peers, "_APPLY_TIMEOUT_S", 0.05)
    with pytest.raises(InternalError, match=r"did not admit 10\.0\.0\.7 within 0\.05 s"):
        async with peers.admitted(ONE):
            pytest.fail("a host was let in that the transport does not admit")
    transport.turn.set()
    async with peers.admitted(OTHER):
        assert "10.0.0.9/32" in transport.admitted
    await peers.close()
