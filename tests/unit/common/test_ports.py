"""One list of default ports: the constants, the documents and the containers agree."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from headrace_common import ports

ROOT = Path(__file__).resolve().parents[3]
PORTS = {value for name, value in vars(ports).items() if name.isupper()}


def test_the_document_lists_every_default_port_once() -> None:
    table = (ROOT / "docs" / "deployment.md").read_text()
    listed = [int(port) for port in re.findall(r"^\| (\d+) \|", table, flags=re.MULTILINE)]
    assert sorted(listed) == sorted(PORTS)
    assert len(PORTS) == len([name for name in vars(ports) if name.isupper()])


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
