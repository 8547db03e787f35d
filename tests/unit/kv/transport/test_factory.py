"""Transports by name, and what an installed Mooncake needs."""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path

import pytest

from headrace_common.errors import ConfigError
from headrace_kv.transport import mooncake
from headrace_kv.transport.factory import open_transport
from tests.in_memory_transport import KIND


def test_an_unknown_kind_is_rejected() -> None:
    assert open_transport(KIND, "127.0.0.1").name == KIND
    with pytest.raises(ConfigError, match="mooncake or in_memory"):
        open_transport("pigeon", "127.0.0.1")


def test_the_environment_selects_mooncakes_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MC_FORCE_TCP", "MC_FORCE_HCA", "MC_TRANSFER_TIMEOUT"):
        monkeypatch.setenv(name, "old")
    assert mooncake.configure_environment("tcp") == "tcp"
    assert os.environ["MC_FORCE_TCP"] == "1"
    assert "MC_FORCE_HCA" not in os.environ
    with pytest.raises(ConfigError, match="choose auto, rdma or tcp"):
        mooncake.configure_environment("avian")


def test_rdma_without_a_device_is_a_config_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(mooncake, "_INFINIBAND", tmp_path / "none")
    with pytest.raises(ConfigError, match="no RDMA device"):
        mooncake.configure_environment("rdma")


@pytest.mark.parametrize(("loaded", "expected"), [(True, "1"), (False, "0")])
def test_device_memory_is_registered_as_the_kernel_supports(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, loaded: bool, expected: str
) -> None:
    module = tmp_path / "nvidia_peermem"
    if loaded:
        module.mkdir()
    monkeypatch.setattr(mooncake, "_PEER_MEMORY_MODULE", module)
    monkeypatch.setenv("WITH_NVIDIA_PEERMEM", "mine")
    mooncake.prepare_device_memory()
    assert os.environ["WITH_NVIDIA_PEERMEM"] == "mine"
    monkeypatch.delenv("WITH_NVIDIA_PEERMEM")
    mooncake.prepare_device_memory()
    assert os.environ["WITH_NVIDIA_PEERMEM"] == expected


def test_two_installed_builds_of_mooncake_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine-cuda13"]

    def version(name: str) -> str:
        if name not in names:
            raise metadata.PackageNotFoundError(name)
        return "0.3.13"

    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(ConfigError, match=" and ".join(names)):
        open_transport("mooncake", "127.0.0.1", "tcp")
