"""The check of a remote pool."""

from __future__ import annotations

import socket

import pytest

from headrace_cli.doctor.finding import Verdict
from headrace_cli.doctor.pool import check_pool


async def test_a_master_that_listens_is_in_order_and_one_that_has_ended_is_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        finding = await check_pool(address)
        assert (finding.verdict, finding.remedy) == (Verdict.OK, "")
    finding = await check_pool(address)
    assert finding.verdict is Verdict.ERROR
    assert address in finding.detail
    assert finding.remedy


@pytest.mark.parametrize("address", ["store", "10.0.0.1:x"])
async def test_an_address_without_a_port_is_named(address: str) -> None:
    finding = await check_pool(address)
    assert finding.verdict is Verdict.ERROR
    assert "--pool" in finding.detail
