"""The firewall of docs/security.md, applied on a host."""

from __future__ import annotations

from tests.security.network_namespaces import require_network_namespaces, run_alone


def test_other_hosts_reach_what_the_firewall_allows_and_nothing_else() -> None:
    require_network_namespaces("nft")
    found = run_alone("firewall_hosts")
    assert found["before"] == [2379, 7051, 7053, 8080, 15_100, 16_999]
    assert found["prefill"] == [7051, 7053, 8080, 15_100, 16_999]
    assert found["operator"] == [7051, 7053, 8080]
    # 8080 is not of the deployment.
    assert found["stranger"] == [8080]
    assert found["registry_reaches_etcd"]
