"""The systemd units and the compose file for hosts with GPUs, beside the page that installs them."""

from __future__ import annotations

import configparser
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace_common.config import ServiceConfig
from headrace_common.process.settings import load_config
from headrace_decode.config import DecodeConfig
from headrace_prefill.config import PrefillConfig
from headrace_registry.config import RegistryConfig
from headrace_router.config import RouterConfig
from headrace_worker.config import BothConfig
from tests.documented import blocks_of
from tests.unit.test_architecture import ROOT

CONFIGS: dict[str, type[ServiceConfig]] = {
    "registry": RegistryConfig,
    "router": RouterConfig,
    "prefill": PrefillConfig,
    "decode": DecodeConfig,
}
# The page has no worker of both roles.
UNIT_CONFIGS: dict[str, type[ServiceConfig]] = {**CONFIGS, "worker": BothConfig}
WORKERS = {"prefill", "decode", "worker"}
UNITS = ROOT / "docker" / "systemd"
PAGE = ROOT / "docs" / "quickstart-gpu.md"
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker" / "compose.gpu.yaml").read_text())
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]


def unit(name: str) -> configparser.SectionProxy:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(UNITS / f"headrace-{name}.service")
    return parser["Service"]


def settings(name: str) -> str:
    """The settings file that the page writes."""
    for block in blocks_of(PAGE):
        for command in block.commands:
            if found := re.match(
                rf"cat > /etc/headrace/{name}\.toml <<END\n(.*)\nEND", command, re.DOTALL
            ):
                return found[1].replace("$MODEL", "sim").replace("$ENGINE", "sim")
    raise AssertionError(f"the page writes no {name}.toml")


@pytest.mark.parametrize("name", UNIT_CONFIGS)
def test_a_unit_runs_its_service_confined_and_drains(name: str) -> None:
    service = unit(name)
    program, flag, file = service["ExecStart"].split()
    assert program == f"/opt/headrace/bin/headrace-{name}"
    assert Path(program).name in SCRIPTS
    assert (flag, file) == ("--config", f"/etc/headrace/{name}.toml")
    grace_s = UNIT_CONFIGS[name].model_fields["drain_grace_s"].default
    assert float(service["TimeoutStopSec"]) >= 2 * grace_s
    assert service["User"] == "headrace"
    assert service["Type"] == "notify"
    # Loading a model has no bound.
    assert (service.get("TimeoutStartSec") == "infinity") == (name in WORKERS)
    for setting in ("NoNewPrivileges", "ProtectHome", "PrivateTmp"):
        assert service[setting] == "true"
    assert service["CapabilityBoundingSet"] == ""
    assert (service.get("LimitMEMLOCK") == "infinity") == (name in WORKERS)
    # Workers need the devices of GPUs and adapters.
    assert (service.get("PrivateDevices") == "true") == (name not in WORKERS)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_settings_of_the_page_are_valid_and_closed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "settings.toml"
    path.write_text(settings(name))
    config = load_config(
        CONFIGS[name], [f"--config={path}"], prog=name, env_prefix=f"HEADRACE_{name.upper()}_"
    )
    assert not config.insecure
    assert config.tls_certificate_file == f"/etc/headrace/{name}/certificate.pem"


@pytest.mark.parametrize("name", CONFIGS)
def test_a_container_is_confined_and_reads_the_settings_of_the_page(name: str) -> None:
    container = COMPOSE["services"][name]
    assert container["command"] == [f"--config=/etc/headrace/{name}.toml"]
    assert "/etc/headrace:/etc/headrace:ro" in container["volumes"]
    assert container["user"] == "10001:10001"
    assert container["read_only"] is True
    assert container["cap_drop"] == ["ALL"]
    assert container["security_opt"] == ["no-new-privileges:true"]
    assert container["network_mode"] == "host"
    assert ("devices" in container) == (name in WORKERS)
    if name in WORKERS:
        assert container["ulimits"]["memlock"] == -1
        (device,) = container["deploy"]["resources"]["reservations"]["devices"]
        assert device["capabilities"] == ["gpu"]
        assert container["build"]["args"] == {"REQUIREMENTS": "worker-cuda"}
