"""One list of default ports: the constants, the documents and the containers agree."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace_cli.options import DEFAULT_ROUTER
from headrace_common import ports
from headrace_common.config import ServiceConfig, split_host_port
from headrace_registry.config import RegistryConfig

ROOT = Path(__file__).resolve().parents[3]
PORTS = {value for name, value in vars(ports).items() if name.isupper()}


def test_the_document_lists_every_default_port_once() -> None:
    table = (ROOT / "docs" / "deployment.md").read_text()
    listed = [int(port) for port in re.findall(r"^\| (\d+) \|", table, flags=re.MULTILINE)]
    assert sorted(listed) == sorted(PORTS)
    assert len(PORTS) == len([name for name in vars(ports) if name.isupper()])


def test_defaults_are_of_the_list() -> None:
    assert split_host_port(DEFAULT_ROUTER)[1] == ports.ROUTER
    for config in (RegistryConfig, ServiceConfig):
        assert split_host_port(config.model_fields["registry"].default)[1] == ports.REGISTRY
    listens = RegistryConfig.model_fields["internal_listen"].default
    assert split_host_port(listens)[1] == ports.REGISTRY


@pytest.mark.parametrize("path", ["docker/compose.yaml", "docs/deployment.md", "docs/security.md"])
def test_examples_use_no_other_port_of_that_range(path: str) -> None:
    used = {int(port) for port in re.findall(r"[:=\s](70\d\d)\b", (ROOT / path).read_text())}
    assert used
    assert used <= PORTS


def test_containers_listen_where_the_list_says() -> None:
    services: dict[str, Any] = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
    expected = {
        "registry": ports.REGISTRY,
        "router": ports.ROUTER_INTERNAL,
        "prefill": ports.PREFILL,
        "decode": ports.DECODE,
    }
    for name, port in expected.items():
        assert f"--internal-listen=0.0.0.0:{port}" in services["services"][name]["command"]
