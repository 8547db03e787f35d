"""In a deployment, only hosts of prefill workers reach Mooncake's ports."""

from __future__ import annotations

from pathlib import Path

from tests.security.network_namespaces import require_network_namespaces, run_alone


def test_only_hosts_of_prefill_workers_reach_the_ports_of_a_deployment(tmp_path: Path) -> None:
    require_network_namespaces("nsenter")
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
