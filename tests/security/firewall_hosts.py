"""The firewall of docs/security.md, applied on this host: python -m tests.security.firewall_hosts.

Needs to own its network namespace. Prints a report as JSON.
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
from contextlib import ExitStack

from tests.security.other_host import HERE, OtherHost
from tests.unit.test_architecture import ROOT

REGISTRY, DECODE, ETCD, OTHER = 7051, 7053, 2379, 8080
KV = (15_100, 16_999)


def reached(host: OtherHost) -> list[int]:
    ports = (REGISTRY, DECODE, ETCD, OTHER, *KV)
    return sorted(port for _, port in host.reached([(HERE, port) for port in ports]))


def rule_set(**addresses: str) -> str:
    """The rules of the page, with other addresses."""
    page = (ROOT / "docs" / "security.md").read_text()
    found = re.search(r"```nft\n(table inet headrace\n.*?)```", page, re.DOTALL)
    assert found
    rules = found[1]
    for name, address in addresses.items():
        rules, count = re.subn(rf"(define {name} = ).*", rf"\g<1>{{ {address} }}", rules)
        assert count == 1, name
    return rules


def main() -> None:
    with ExitStack() as stack:
        prefill, operator, stranger = (OtherHost(number) for number in range(3))
        for host in (prefill, operator, stranger):
            stack.callback(host.close)
        for port in (REGISTRY, DECODE, ETCD, OTHER, *KV):
            stack.enter_context(socket.create_server(("", port)))
        rules = rule_set(
            registry=HERE,
            routers="10.99.0.1",
            prefills=prefill.address,
            decodes=HERE,
            operators=f"{operator.address}/32",
        )
        report: dict[str, object] = {"before": reached(stranger)}
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
