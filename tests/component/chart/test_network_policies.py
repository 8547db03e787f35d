"""The chart's network policies permit what the table of ports in docs/security.md says, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.component.chart.charts import (
    COMPONENTS,
    EXAMPLES,
    RELEASE,
    container_of,
    manifests,
    of_kind,
    require_helm,
    workloads,
)
from tests.unit.test_architecture import ROOT

SECURITY = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
MOONCAKE = (15000, 17000)
SYSTEM = (32768, 60999)
METRICS = (9464, 9464)
# Everything that opens a port.
FEATURES = (
    "registry.store.endpoints={etcd:2379}",
    "router.status=true",
    "metrics.enabled=true",
    "metrics.keysSecret=keys",
    "inferencePool.enabled=true",
    "planner.enabled=true",
)

Reach = tuple[str, tuple[int, int], str]
"""A component, the first and last of its ports, and a caller: a component, or every address."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table."""

    port: str
    process: str
    callers: str


def rows() -> list[Row]:
    section = SECURITY.partition("\n## Ports\n")[2].partition("\n\nThe ports from")[0]
    cells = [line.strip("|").split("|") for line in section.splitlines() if line[:1] == "|"][2:]
    return [Row(*(text.strip() for text in found[:3])) for found in cells]


# By the first cell: the component and its ports. None: a process that the chart does not run.
PORTS: dict[str, list[tuple[str, tuple[int, int]]] | None] = {
    "`listen` of the router": [("router", (7050, 7050))],
    "`http_listen` of the router, if set": [("router", (7056, 7056))],
    "`endpoint_picker_listen` of the router, if set": [("router", (9002, 9002))],
    "`metrics_listen`, if set": [(name, METRICS) for name in COMPONENTS],
    # A kubelet reaches the pods of its node whatever the policies are.
    "`health_listen`, if set": [(name, (7059, 7059)) for name in COMPONENTS],
    "`status_listen` of the router, if set": [("router", (7057, 7057))],
    "`http_listen` of a worker that generates, if set": [
        ("decode", (8000, 8000)),
        ("worker", (8000, 8000)),
    ],
    "`internal_listen` of the router": [("router", (7054, 7054))],
    "`internal_listen` of the registry": [("registry", (7051, 7051))],
    "`internal_listen` of a prefill worker": [("prefill", (7052, 7052))],
    "`internal_listen` of a decode worker": [("decode", (7053, 7053))],
    "`internal_listen` of a worker of both roles": [("worker", (7055, 7055))],
    "`internal_listen` of the planner": [("planner", (7058, 7058))],
    "one port that the system chooses, per rank": [
        ("decode", SYSTEM),
        ("prefill", SYSTEM),
        ("worker", SYSTEM),
    ],
    "15000 to 17000, two per rank": [("decode", MOONCAKE), ("worker", MOONCAKE)],
    "the same, two to four per rank": [("prefill", MOONCAKE)],
    # The chart runs no data-parallel ranks.
    "`--data-parallel-rpc-port` and the port after it, and ports that vLLM chooses": None,
    # Of the examples, one has several hosts: test_chart.py checks them.
    "`--master-port` and the port after it, and ports that vLLM chooses": None,
    "`store`": None,
    "`kv_pool_address`, if set": None,
    "the ports of the store's memory": None,
}
# Words of the third cell, the longer ones first.
CALLERS: dict[str, set[str]] = {
    "probes of its own host": set(),
    "browsers of operators": {"operator"},
    "clients with a ticket": {"every address"},
    "workers": {"prefill", "decode", "worker"},
    "operators": {"operator"},
    "planners": {"planner"},
    "routers": {"router"},
    "gateways": {"gateway"},
    "clients": {"every address"},
    "Prometheus": {"monitoring"},
}


def callers_of(row: Row) -> set[str]:
    """What a row permits."""
    found: set[str] = set()
    main = row.callers
    for words, callers in CALLERS.items():
        if words in main:
            found |= callers
            main = main.replace(words, "")
    rest = re.sub(r"[,\s]|\band\b", "", main)
    assert not rest, f"{row.callers}: {rest} is no caller that this test has"
    return found


def documented() -> set[Reach]:
    return {
        (component, ports, caller)
        for row in rows()
        for component, ports in PORTS[row.port] or ()
        for caller in callers_of(row)
    }


def permitted(flags: tuple[str, ...]) -> set[Reach]:
    return set(reaches(of_kind(trial(flags), "NetworkPolicy")))


def reaches(policies: dict[str, Any]) -> Iterator[Reach]:
    for name, policy in policies.items():
        if name == RELEASE:
            continue
        selected = policy["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
        assert selected == name
        for rule in policy["spec"]["ingress"]:
            for port in rule["ports"]:
                for caller in [peer_name(peer) for peer in rule.get("from", [None])]:
                    yield name, (port["port"], port.get("endPort", port["port"])), caller


def peer_name(peer: Any) -> str:
    if peer is None:
        return "every address"
    labels = next(iter(peer.values()))["matchLabels"]
    if "namespaceSelector" in peer:
        return str(labels["kubernetes.io/metadata.name"])
    assert labels["app.kubernetes.io/instance"] == RELEASE
    return str(labels["app.kubernetes.io/component"])


@pytest.fixture(autouse=True)
def _helm() -> None:
    require_helm()


def test_every_row_of_the_table_is_covered() -> None:
    assert [row.port for row in rows()] == list(dict.fromkeys(row.port for row in rows()))
    assert {row.port for row in rows()} == PORTS.keys()


@pytest.mark.parametrize("flags", [FEATURES, ("router.http=false",)])
def test_the_policies_equal_the_table(flags: tuple[str, ...]) -> None:
    wanted, found = documented(), permitted(flags)
    if flags[0] not in FEATURES:
        # Ports of features that are off.
        open_ports = {
            (name, port["containerPort"])
            for name, item in workloads(trial(flags)).items()
            for port in container_of(item)["ports"]
        }
        wanted = {
            one
            for one in wanted
            if (one[0], one[1][0]) in open_ports or one[1] in (MOONCAKE, SYSTEM)
        }
        assert ("router", (7056, 7056), "every address") not in found
    # A planner that the chart does not run is named as a caller all the same.
    assert found == wanted


def trial(flags: tuple[str, ...]) -> Any:
    return manifests(
        *("--values", str(next(path for path in EXAMPLES if path.stem == "trial"))),
        *(word for flag in flags for word in ("--set", flag)),
    )


def test_nothing_else_reaches_a_pod() -> None:
    policies = of_kind(trial(FEATURES), "NetworkPolicy")
    closed = policies.pop(RELEASE)["spec"]
    assert closed["policyTypes"] == ["Ingress"]
    assert closed["ingress"] == []
    labels = closed["podSelector"]["matchLabels"].items()
    for workload in workloads(trial(FEATURES)).values():
        assert labels <= workload["spec"]["template"]["metadata"]["labels"].items()
    assert {policy["spec"]["policyTypes"][0] for policy in policies.values()} == {"Ingress"}


def test_peers_of_values_are_added() -> None:
    flags = ("networkPolicy.clients[0].podSelector.matchLabels.app=web",)
    policy = of_kind(trial(flags), "NetworkPolicy")["router"]
    (clients,) = (
        rule
        for rule in policy["spec"]["ingress"]
        if {"port": 7050, "protocol": "TCP"} in rule["ports"]
    )
    assert clients["from"] == [{"podSelector": {"matchLabels": {"app": "web"}}}]
