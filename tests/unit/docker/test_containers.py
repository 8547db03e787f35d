"""Containers: compose.yaml, as it is parsed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
import yaml

from headrace_common.config import ServiceConfig
from headrace_common.process.settings import load_config
from headrace_common.rpc.server import DRAIN_OVERRUN_MAX_S
from headrace_decode.config import DecodeConfig
from headrace_planner_service.config import PlannerConfig
from headrace_prefill.config import PrefillConfig
from headrace_registry.config import RegistryConfig
from headrace_router.config import RouterConfig
from tests.unit.test_architecture import ROOT

DOCKER = ROOT / "docker"
COMPOSE: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text(encoding="utf-8"))
CONTAINERS: dict[str, dict[str, Any]] = COMPOSE["services"]
SERVICES: dict[str, type[ServiceConfig]] = {
    "registry": RegistryConfig,
    "router": RouterConfig,
    "prefill": PrefillConfig,
    "decode": DecodeConfig,
}
# Only started on request.
OPTIONAL: dict[str, type[ServiceConfig]] = {"planner": PlannerConfig}
USER = "10001:10001"


def mounts_of(container: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Path in the container: source and mode."""
    mounts = {}
    for text in container.get("volumes", ()):
        source, target, *mode = re.sub(r"\$\{[^}]*\}", "VARIABLE", text).split(":")
        mounts[target] = (source, mode[0] if mode else "rw")
    return mounts


def settings_of(container: Mapping[str, Any]) -> list[str]:
    """The command, with the default of each variable."""
    return [re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", word) for word in container["command"]]


@pytest.mark.parametrize("name", CONTAINERS)
def test_every_container_is_confined(name: str) -> None:
    container = CONTAINERS[name]
    assert container["user"] == USER
    assert container["read_only"] is True
    assert container["cap_drop"] == ["ALL"]
    assert container["security_opt"] == ["no-new-privileges:true"]
    given = container.keys() & {
        *("privileged", "cap_add", "devices", "pid", "ipc", "userns_mode", "cgroup", "env_file"),
    }
    assert not given
    assert container.get("network_mode", "none") == "none"
    for text in container["tmpfs"]:
        path, _, options = text.partition(":")
        assert path == "/tmp"
        assert {"noexec", "nosuid", "nodev"} <= set(options.split(","))
        assert re.search(r"\bsize=\d+[mg]\b", options)
    for port in container.get("ports", ()):
        assert port.startswith("127.0.0.1:")


def test_only_the_store_and_the_first_step_write_to_volumes() -> None:
    writable = {
        (name, source)
        for name, container in CONTAINERS.items()
        for source, mode in mounts_of(container).values()
        if mode != "ro"
    }
    credentials = {source for source, _ in mounts_of(CONTAINERS["credentials"]).values()}
    credentials -= {"./credentials.sh"}
    assert writable == {("etcd", "etcd-data"), *(("credentials", name) for name in credentials)}


@pytest.mark.parametrize("name", [*SERVICES, *OPTIONAL, "operator"])
def test_a_service_has_its_own_credentials_only(name: str) -> None:
    mounts = mounts_of(CONTAINERS[name])
    assert mounts.pop("/credentials") == (f"{name}-credentials", "ro")
    assert mounts in ({}, {"/models": ("VARIABLE", "ro")})
    written = mounts_of(CONTAINERS["credentials"])
    assert written[f"/credentials/{name}"] == (f"{name}-credentials", "rw")


@pytest.mark.parametrize("name", [*SERVICES, *OPTIONAL])
def test_a_service_accepts_its_settings_and_uses_tokens(name: str) -> None:
    words = settings_of(CONTAINERS[name])
    kind = {**SERVICES, **OPTIONAL}[name]
    config = load_config(kind, words, prog=name, env_prefix=f"HEADRACE_{name.upper()}_")
    assert not config.insecure
    assert config.token_file == "/credentials/token"
    assert config.token_keys_file == "/credentials/token_keys.pem"
    needs = CONTAINERS[name]["depends_on"]["credentials"]
    assert needs == {"condition": "service_completed_successfully"}


def test_only_the_registry_reaches_etcd() -> None:
    assert COMPOSE["networks"]["store"] == {"internal": True}
    members = {
        name for name, container in CONTAINERS.items() if "store" in container.get("networks", ())
    }
    assert members == {"etcd", "registry"}
    assert CONTAINERS["etcd"]["networks"] == ["store"]
    assert "ports" not in CONTAINERS["etcd"]


@pytest.mark.parametrize("name", [*SERVICES, *OPTIONAL])
def test_a_stop_leaves_time_for_the_drain(name: str) -> None:
    kind = {**SERVICES, **OPTIONAL}[name]
    needed_s = kind.model_fields["drain_grace_s"].default + DRAIN_OVERRUN_MAX_S
    assert float(CONTAINERS[name]["stop_grace_period"].removesuffix("s")) > needed_s
