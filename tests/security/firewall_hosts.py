"""The rules of `headrace doctor --firewall`, applied on this host: python -m tests.security.firewall_hosts.

Needs to own its network namespace. Prints a report as JSON.
"""

from __future__ import annotations

import json
import socket
import subprocess
from contextlib import ExitStack

from headrace.registry.v1 import registry_pb2
from headrace_cli.doctor.firewall import Surroundings, check_rules, rule_set
from tests.security.other_host import HERE, OtherHost

REGISTRY, DECODE, ETCD, OTHER = 7001, 7100, 2379, 8080
KV = (15_100, 16_999)
_Role = registry_pb2.Member.Role


def reached(host: OtherHost) -> list[int]:
    ports = (REGISTRY, DECODE, ETCD, OTHER, *KV)
    return sorted(port for _, port in host.reached([(HERE, port) for port in ports]))


def main() -> None:
    with ExitStack() as stack:
        prefill, operator, stranger = (OtherHost(number) for number in range(3))
        for host in (prefill, operator, stranger):
            stack.callback(host.close)
        for port in (REGISTRY, DECODE, ETCD, OTHER, *KV):
            stack.enter_context(socket.create_server(("", port)))
        members = [
            registry_pb2.Member(
                worker_id="decode-0", role=_Role.ROLE_DECODE, endpoint=f"{HERE}:{DECODE}"
            ),
            registry_pb2.Member(
                worker_id="prefill-0", role=_Role.ROLE_PREFILL, endpoint=f"{prefill.address}:7200"
            ),
        ]
        around = Surroundings(
            host=(HERE,),
            registry=f"{HERE}:{REGISTRY}",
            etcd=f"{HERE}:{ETCD}",
            operators=(f"{operator.address}/32",),
        )
        rules = rule_set(members, around)
        report: dict[str, object] = {"before": reached(stranger), "note": check_rules(rules)}
        # The second time, the rules replace themselves.
        for _ in range(2):
            subprocess.run(["nft", "-f", "-"], input=rules, text=True, check=True)
        report["prefill"] = reached(prefill)
        report["operator"] = reached(operator)
        report["stranger"] = reached(stranger)
        with socket.create_connection((HERE, ETCD), timeout=1.0):
            report["registry_reaches_etcd"] = True
        print(json.dumps(report))


if __name__ == "__main__":
    main()
