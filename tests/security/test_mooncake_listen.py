"""Other hosts reach Mooncake's ports at the worker's own address only, and not at all on loopback.

In a deployment only hosts of prefill workers reach them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.security.network_namespaces import require_network_namespaces, run_alone
from tests.security.other_host import HERE, HERE_IPV6, LOOPBACK

# A receiving and a sending engine have two ports each.
_PORTS = 4


@pytest.fixture(autouse=True)
def _network_namespaces() -> None:
    require_network_namespaces("nsenter")


def report(host: str) -> dict[str, Any]:
    """What tests.security.mooncake_ports prints about a transport at `host`."""
    found = run_alone("mooncake_ports", host)
    assert found["written_here"]
    assert set(found["control"]) == {LOOPBACK, HERE, HERE_IPV6}
    assert len(found["ports"]) == _PORTS
    assert found["other_ports"]
    return found


def test_other_hosts_reach_no_port_of_a_transport_on_loopback() -> None:
    found = report(LOOPBACK)
    # The receiver of packed bytes is an ordinary server on loopback, which route_localnet opens. It needs a secret.
    assert found["reached"] == [[LOOPBACK, port] for port in found["other_ports"]]
    assert found["write"] != "ok"
    assert not found["written_there"]


def test_other_hosts_reach_a_transport_at_its_own_address_only() -> None:
    found = report(HERE)
    assert found["reached"] == [
        [HERE, port] for port in sorted(found["ports"] + found["other_ports"])
    ]
    assert found["write"] == "ok"
    assert found["written_there"]


def test_only_hosts_of_prefill_workers_reach_the_ports_of_a_deployment(tmp_path: Path) -> None:
    found = run_alone("transfer_hosts", str(tmp_path))
    # Two of Mooncake, and one of the receiver of packed bytes.
    assert len(found["kv_ports"]) == 3, found
    # Its packets arrive: it reaches the services, which know roles.
    assert found["public"] == [7000, 7001, 7100]
    assert found["before"] == []
    assert found["prefilled_by"] == "prefill-0"
    assert found["peer"] == found["kv_ports"]
    # The stranger knows the session and the address of the memory.
    assert found["stranger"] == found["public"]
    assert found["write"] != "ok"
    assert found["prefilled_again_by"] == "prefill-0"
    # Nothing connects to a prefill worker's transport.
    assert len(found["prefill_ports"]["all"]) == 6
    assert found["prefill_ports"]["reached"] == [7200]
    assert found["after"] == []
