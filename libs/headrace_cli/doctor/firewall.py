"""Writes the rules of a host's firewall (nftables) from the members of a deployment."""

from __future__ import annotations

import ipaddress
import shutil
import socket
import subprocess
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from headrace.registry.v1 import registry_pb2
from headrace_cli.doctor.this_host import KV_PORTS
from headrace_common.config import split_host_port
from headrace_common.errors import ConfigError

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_Role = registry_pb2.Member.Role
_TABLE: Final = "inet headrace"
_NFT_TIMEOUT_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the registry does not list. `host`: names or addresses of the host that the rules are for.

    `registry`, `etcd` and `pool` are "host:port"; empty means none. `pool` is the master of the remote pool, with
    memory on the same host. `operators` call every service; `clients` call decode workers with tickets.
    """

    host: tuple[str, ...]
    registry: str
    etcd: str = ""
    pool: str = ""
    operators: tuple[str, ...] = ()
    clients: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Rule:
    """Only `sources` reach `ports`, such as "7100" or "15000-17000"."""

    what: str
    ports: str
    sources: frozenset[_Network]


def rule_set(members: Sequence[registry_pb2.Member], around: Surroundings) -> str:
    """Rules for `nft -f`, which replace those of an earlier call.

    Other hosts than those of the deployment reach no port of a service on this host, but that of a router. Raises
    ConfigError when an address is unknown, or when nothing of the deployment is on this host.
    """
    rules = list(_rules(members, around))
    if not rules:
        raise ConfigError(
            f"no service of the deployment is on {', '.join(around.host)}: name this host's addresses with --host"
        )
    lines = [
        f"table {_TABLE}",
        f"delete table {_TABLE}",
        f"table {_TABLE} {{",
        "\tchain input {",
        "\t\ttype filter hook input priority filter; policy accept;",
        '\t\tiifname "lo" accept',
        "\t\tct state established,related accept",
    ]
    for rule in rules:
        lines.append(f"\t\t# {rule.what}")
        for version, word in ((4, "ip"), (6, "ip6")):
            networks = _merged(rule.sources, version)
            if networks:
                lines.append(
                    f"\t\t{word} saddr {{ {', '.join(networks)} }} tcp dport {rule.ports} accept"
                )
        lines.append(f"\t\ttcp dport {rule.ports} drop")
    return "\n".join([*lines, "\t}", "}", ""])


def check_rules(rules: str) -> str:
    """Has nft check the rules without applying them. Returns what was not checked, or nothing.

    Raises ConfigError when they are wrong.
    """
    program = shutil.which("nft")
    if program is None:
        return "nft is not installed here, so it has not checked the rules"
    checked = subprocess.run(
        [program, "-c", "-f", "-"],
        input=rules,
        capture_output=True,
        text=True,
        timeout=_NFT_TIMEOUT_S,
        check=False,
    )
    if checked.returncode == 0:
        return ""
    if "not permitted" in checked.stderr:
        return "nft checks rules for root only, so it has not checked these"
    raise ConfigError(f"nft rejects the rules: {' '.join(checked.stderr.split())}")


def _rules(members: Sequence[registry_pb2.Member], around: Surroundings) -> Iterator[_Rule]:
    here = frozenset[_Address]().union(*map(_addresses_of, around.host))
    hosts = {member.worker_id: _addresses_of(_host(member.endpoint)) for member in members}

    def of(*roles: registry_pb2.Member.Role.ValueType) -> frozenset[_Network]:
        found = [hosts[one.worker_id] for one in members if one.role in roles]
        return _networks(address for addresses in found for address in addresses)

    operators, clients = _parsed(around.operators), _parsed(around.clients)
    routers, prefills = of(_Role.ROLE_ROUTER), of(_Role.ROLE_PREFILL)
    decodes = of(_Role.ROLE_DECODE)
    registry_hosts = _addresses_of(_host(around.registry))
    everyone = routers | prefills | decodes
    if registry_hosts & here:
        port = str(split_host_port(around.registry)[1])
        yield _Rule("the registry", port, everyone | operators)
    if port := _port_here("--etcd", around.etcd, here):
        yield _Rule("etcd: the registry only", port, _networks(registry_hosts))
    moves_kv = False
    if port := _port_here("--pool", around.pool, here):
        yield _Rule("the remote pool's master: workers only", port, prefills | decodes)
        moves_kv = True
    for member in sorted(members, key=lambda one: one.worker_id):
        if not hosts[member.worker_id] & here:
            continue
        callers = routers | operators
        if member.role == _Role.ROLE_ROUTER:
            callers = everyone | operators
        elif member.role == _Role.ROLE_DECODE:
            callers |= prefills
            if member.client_endpoint:
                port = str(split_host_port(member.client_endpoint)[1])
                yield _Rule(f"{member.worker_id}: its clients", port, clients)
        moves_kv |= member.role != _Role.ROLE_ROUTER
        port = str(split_host_port(member.endpoint)[1])
        yield _Rule(f"{member.worker_id}: its services", port, callers)
    if moves_kv:
        ports = f"{KV_PORTS[0]}-{KV_PORTS[-1]}"
        yield _Rule("KV transfers between workers", ports, prefills | decodes)


def _port_here(option: str, address: str, here: frozenset[_Address]) -> str:
    """The port of an address that the user gave with `option`. Empty for none, or for one on another host."""
    if not address:
        return ""
    try:
        _, port = split_host_port(address)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from error
    return str(port) if _addresses_of(_host(address)) & here else ""


def _host(endpoint: str) -> str:
    return split_host_port(endpoint)[0].strip("[]")


def _addresses_of(host: str) -> frozenset[_Address]:
    try:
        rows = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            f"the host {host} is unknown here ({error}): rules need its address, so make the name resolve"
        ) from error
    return frozenset(ipaddress.ip_address(str(row[4][0]).partition("%")[0]) for row in rows)


def _networks(addresses: Iterable[_Address]) -> frozenset[_Network]:
    return frozenset(ipaddress.ip_network(address) for address in addresses)


def _parsed(texts: Collection[str]) -> frozenset[_Network]:
    try:
        return frozenset(map(ipaddress.ip_network, texts))
    except ValueError as error:
        raise ConfigError(f"{error}: give networks such as 10.0.0.0/24") from error


def _merged(networks: frozenset[_Network], version: int) -> list[str]:
    if version == 4:
        four = [one for one in networks if isinstance(one, ipaddress.IPv4Network)]
        return [str(one) for one in ipaddress.collapse_addresses(four)]
    six = [one for one in networks if isinstance(one, ipaddress.IPv6Network)]
    return [str(one) for one in ipaddress.collapse_addresses(six)]
