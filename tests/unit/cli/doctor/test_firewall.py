"""The text of the firewall's rules."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from headrace.registry.v1 import registry_pb2
from headrace_cli.doctor.firewall import Surroundings, check_rules, rule_set
from headrace_common.errors import ConfigError

Role = registry_pb2.Member.Role
MEMBERS = [
    registry_pb2.Member(
        worker_id=name, role=role, endpoint=endpoint, client_endpoint=client_endpoint
    )
    for name, role, endpoint, client_endpoint in (
        ("router-0", Role.ROLE_ROUTER, "10.0.0.1:7000", "10.0.0.1:7050"),
        ("prefill-0", Role.ROLE_PREFILL, "10.0.0.2:7200", ""),
        ("prefill-1", Role.ROLE_PREFILL, "10.0.0.3:7200", ""),
        ("decode-0", Role.ROLE_DECODE, "10.0.0.4:7100", "10.0.0.4:7055"),
        ("decode-1", Role.ROLE_DECODE, "[fd00::5]:7100", ""),
    )
]


def rules_of(host: str, **surroundings: object) -> list[str]:
    """The rules that name a port."""
    given = {"registry": "10.0.0.9:7001", **surroundings}
    text = rule_set(MEMBERS, Surroundings(host=(host,), **given))  # type: ignore[arg-type]
    return [line.strip() for line in text.splitlines() if "dport" in line]


def test_a_decode_worker_is_reached_by_routers_prefill_workers_and_named_networks() -> None:
    assert rules_of("10.0.0.4", operators=("10.9.0.0/16",), clients=("fd09::/64",)) == [
        "ip6 saddr { fd09::/64 } tcp dport 7055 accept",
        "tcp dport 7055 drop",
        "ip saddr { 10.0.0.1/32, 10.0.0.2/31, 10.9.0.0/16 } tcp dport 7100 accept",
        "tcp dport 7100 drop",
        "ip saddr { 10.0.0.2/31, 10.0.0.4/32 } tcp dport 15000-17000 accept",
        "ip6 saddr { fd00::5/128 } tcp dport 15000-17000 accept",
        "tcp dport 15000-17000 drop",
    ]


def test_a_prefill_worker_is_reached_by_routers() -> None:
    assert rules_of("10.0.0.2")[:2] == [
        "ip saddr { 10.0.0.1/32 } tcp dport 7200 accept",
        "tcp dport 7200 drop",
    ]


def test_a_router_is_open_to_clients_and_reached_by_the_deployment() -> None:
    assert rules_of("10.0.0.1", operators=("10.9.0.0/16",)) == [
        "ip saddr { 10.0.0.1/32, 10.0.0.2/31, 10.0.0.4/32, 10.9.0.0/16 } tcp dport 7000 accept",
        "ip6 saddr { fd00::5/128 } tcp dport 7000 accept",
        "tcp dport 7000 drop",
    ]


def test_the_registry_and_etcd_are_reached_by_the_deployment() -> None:
    assert rules_of("10.0.0.9", etcd="10.0.0.9:2379") == [
        "ip saddr { 10.0.0.1/32, 10.0.0.2/31, 10.0.0.4/32 } tcp dport 7001 accept",
        "ip6 saddr { fd00::5/128 } tcp dport 7001 accept",
        "tcp dport 7001 drop",
        "ip saddr { 10.0.0.9/32 } tcp dport 2379 accept",
        "tcp dport 2379 drop",
    ]


def test_the_remote_pool_is_reached_by_workers() -> None:
    workers = ("ip saddr { 10.0.0.2/31, 10.0.0.4/32 }", "ip6 saddr { fd00::5/128 }")
    assert rules_of("10.0.0.8", pool="10.0.0.8:50051") == [
        *(f"{sources} tcp dport 50051 accept" for sources in workers),
        "tcp dport 50051 drop",
        *(f"{sources} tcp dport 15000-17000 accept" for sources in workers),
        "tcp dport 15000-17000 drop",
    ]
    # On another host.
    assert not any("50051" in rule for rule in rules_of("10.0.0.2", pool="10.0.0.8:50051"))


@pytest.mark.parametrize(
    ("host", "surroundings", "text"),
    [
        ("10.0.0.77", {}, "no service of the deployment is on 10.0.0.77"),
        ("10.0.0.4", {"operators": ("10.0.0.1/8",)}, "give networks such as"),
        ("worker.invalid", {}, "the host worker.invalid is unknown here"),
        ("10.0.0.4", {"pool": "10.0.0.8"}, "--pool: write it as host:port"),
        ("10.0.0.4", {"etcd": "10.0.0.8"}, "--etcd: write it as host:port"),
    ],
)
def test_wrong_hosts_and_networks_are_named(
    host: str, surroundings: dict[str, object], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        rules_of(host, **surroundings)


def test_nft_checks_the_rules_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    results = {"": 0, "Operation not permitted (you must be root)": 1, "syntax error": 1}

    def run(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], results[error], "", error)

    monkeypatch.setattr(shutil, "which", lambda name: "/usr/sbin/nft")
    monkeypatch.setattr(subprocess, "run", run)
    error = ""
    assert check_rules("rules") == ""
    error = "Operation not permitted (you must be root)"
    assert "for root only" in check_rules("rules")
    error = "syntax error"
    with pytest.raises(ConfigError, match="nft rejects the rules: syntax error"):
        check_rules("rules")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "not installed" in check_rules("rules")
