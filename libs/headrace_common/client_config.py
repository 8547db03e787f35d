"""Settings of the services that clients call: the router, and decode workers behind a gateway."""

from __future__ import annotations

import logging
import resource
from dataclasses import replace
from typing import Final

from pydantic import Field, model_validator

from headrace_common.access.credentials import TlsFiles
from headrace_common.config import (
    WILDCARD_HOSTS,
    OptionalHostPort,
    PositiveCount,
    ServiceConfig,
    checked,
    reachable_addresses,
    wildcard_problems,
)
from headrace_common.ports import split_host_port

_LOG = logging.getLogger(__name__)

# For connections that the process opens, its files and its libraries.
_RESERVED: Final = 512


def reserve_descriptors(
    wanted: int, listeners: int = 1, *, others: int = 0, enough: int = 0
) -> int:
    """Raises the limit of open files for `wanted` connections to each of several listeners.

    Returns how many each may have, beside what the process needs and `others`. Warns when they are fewer than `enough`,
    which means `wanted` where it is 0.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    reserved = others + _RESERVED
    needed = wanted * listeners + reserved
    if needed > soft:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    fitting = max(1, (soft - reserved) // listeners)
    if fitting < (enough or wanted):
        _LOG.warning(
            "a listener should have %d connections, but the limit of open files leaves %d: raise it (ulimit -n)",
            enough or wanted,
            fitting,
        )
    return min(wanted, fitting)


# More where max_concurrent_requests asks for it.
CALLS_PER_CALLER: Final = 2_048
CONNECTIONS: Final = 4_096


class ClientAccessConfig(ServiceConfig):
    """The settings that all listeners for clients share."""

    client_certificates: bool = Field(
        default=True,
        description="Whether clients need a certificate where their listeners have TLS. Without it, the connection is "
        "encrypted and API keys decide: for clients without certificates, such as most HTTP clients.",
    )
    anonymous_clients: bool = Field(
        default=False,
        description="Whether clients beyond loopback may call without a credential. For networks, or behind a proxy, "
        "that only permitted clients reach.",
    )
    max_concurrent_requests: PositiveCount = Field(
        default=1_024,
        description="Requests in flight before new ones are rejected. A client listener has 4,096 connections, or four "
        "times as many, and one caller 2,048 calls in flight, or twice as many. 4,194,304 prompt tokens may wait for "
        "their prefill, or 4,096 for each of these requests. Raise it for workers with more slots.",
    )

    @property
    def calls_per_caller_max(self) -> int:
        """RPCs and HTTP requests in flight of one caller: a tenant, or without a known API key a host."""
        return max(CALLS_PER_CALLER, 2 * self.max_concurrent_requests)

    @property
    def clients_prove_themselves(self) -> bool:
        """Whether requests need a credential of their own, such as an API key."""
        return False

    def connections_max(self) -> int:
        """Connections to each client listener. Raises this process's limit of open files for all of them.

        Under a lower limit, internal_listen has the share of one of them.
        """
        return reserve_descriptors(
            max(CONNECTIONS, 4 * self.max_concurrent_requests), self.client_listeners + 1
        )

    @property
    def client_listeners(self) -> int:
        """The number of addresses at which clients connect."""
        return 0

    @property
    def listen_tls(self) -> TlsFiles:
        """The files of the listeners for clients, without an authority where no certificate is needed.

        Empty means plaintext.
        """
        authority = self.tls_authority_file if self.client_certificates else ""
        return replace(TlsFiles.from_config(self), tls_authority_file=authority)

    def unguarded_problems(self, *settings: str) -> list[str]:
        """What is wrong with these addresses for clients: other hosts reach them, and clients need no credential."""
        guarded = (
            self.insecure
            or self.anonymous_clients
            or self.clients_prove_themselves
            or bool(self.listen_tls.tls_authority_file)
        )
        return [
            f"{name} is {address}, which other hosts may reach, and clients need no credential there: set "
            "api_keys_file, or TLS with client_certificates, or set anonymous_clients, which lets every caller "
            "send requests"
            for name, address in reachable_addresses(self, *settings)
            if not guarded
        ]


class ClientFacingConfig(ClientAccessConfig):
    """The settings of the gRPC listener for clients. It serves no RPC of internal_listen."""

    listen: OptionalHostPort = Field(
        default="127.0.0.1:0",
        description="host:port to serve clients on; port 0 takes any free port.",
    )
    advertise: OptionalHostPort = Field(
        default="",
        description="host:port at which clients reach listen. Port 0 means the port of listen; empty means its "
        "address.",
    )

    listen_tls_certificate_file: str = Field(
        default="",
        description="PEM certificate of the listeners for clients, read again when it changes. Empty "
        "means tls_certificate_file.",
    )
    listen_tls_key_file: str = Field(
        default="",
        description="PEM private key of listen_tls_certificate_file; read again when it changes.",
    )
    listen_tls_authority_file: str = Field(
        default="",
        description="PEM certificates of the authorities that sign clients' certificates; read again when it changes. "
        "Empty means tls_authority_file.",
    )

    @property
    def client_listeners(self) -> int:
        return super().client_listeners + bool(self.listen)

    @property
    def listen_tls(self) -> TlsFiles:
        authority = self.listen_tls_authority_file or self.tls_authority_file
        own = (self.listen_tls_certificate_file, self.listen_tls_key_file)
        certificate, key = own if any(own) else (self.tls_certificate_file, self.tls_key_file)
        return TlsFiles(certificate, key, authority if self.client_certificates else "")

    @model_validator(mode="after")
    def _check_tls(self) -> ClientFacingConfig:
        problems = self.tls_problems() if self.client_listeners else []
        return checked(self, problems)

    def tls_problems(self) -> list[str]:
        """What is wrong with the TLS files for clients."""
        problems: list[str] = []
        if bool(self.listen_tls_certificate_file) != bool(self.listen_tls_key_file):
            problems.append("set listen_tls_certificate_file and listen_tls_key_file together")
        files = self.listen_tls
        if files.tls_certificate_file and self.client_certificates and not files.tls_authority_file:
            problems.append(
                "client_certificates needs listen_tls_authority_file: name the authorities of clients, or set "
                "client_certificates to false"
            )
        if self.listen_tls_authority_file and not files.tls_certificate_file:
            problems.append(
                "listen_tls_authority_file needs listen_tls_certificate_file and listen_tls_key_file"
            )
        return problems

    @model_validator(mode="after")
    def _check_listen(self) -> ClientFacingConfig:
        if not self.listen:
            return self
        problems = wildcard_problems(self, "listen", "advertise")
        problems += self.unguarded_problems("listen", "advertise")
        host, port = split_host_port(self.listen)
        internal_host, internal_port = split_host_port(self.internal_listen)
        overlap = host == internal_host or {host, internal_host} & set(WILDCARD_HOSTS)
        if port and port == internal_port and overlap:
            problems.append(
                f"listen and internal_listen both take port {port}: give them different ports, because they serve "
                "different callers"
            )
        return checked(self, problems)
