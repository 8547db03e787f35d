"""RDMA adapters that a user names."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace_common.errors import ConfigError
from headrace_engine.worker.config import WorkerConfig
from headrace_kv.transport import mooncake


@pytest.fixture
def adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This host has two adapters."""
    for name in ("mlx5_0", "mlx5_1"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(mooncake, "_INFINIBAND", tmp_path)


class Engine:
    """Records what Mooncake's engine is started with."""

    started: list[tuple[str, ...]]

    def initialize(self, *arguments: str) -> int:
        Engine.started.append(arguments)
        return -1


def start(monkeypatch: pytest.MonkeyPatch, protocol: str, *devices: str) -> str:
    """The devices that Mooncake is given."""
    Engine.started = []
    monkeypatch.setattr(mooncake, "_load_engine_type", lambda: Engine)
    opened = mooncake.open_mooncake("127.0.0.1", protocol, rdma_devices=devices)
    with pytest.raises(ConfigError, match="cannot start"):
        opened.session  # noqa: B018
    opened.close()
    return Engine.started[0][3]


@pytest.mark.usefixtures("adapters")
def test_only_the_named_adapters_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert start(monkeypatch, "rdma", "mlx5_1") == "mlx5_1"
    assert start(monkeypatch, "rdma", "mlx5_0", "mlx5_1") == "mlx5_0,mlx5_1"
    assert start(monkeypatch, "rdma") == ""
    assert start(monkeypatch, "tcp", "mlx5_1") == ""


@pytest.mark.usefixtures("adapters")
def test_a_missing_adapter_is_named_with_those_that_exist() -> None:
    with pytest.raises(ConfigError, match="no RDMA adapter mlx5_7, but mlx5_0, mlx5_1") as caught:
        mooncake.open_mooncake("127.0.0.1", "auto", rdma_devices=("mlx5_0", "mlx5_7"))
    assert caught.value.metadata["field"] == "rdma_devices"


def test_without_adapters_tcp_is_named_in_the_log_and_refused_where_one_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mooncake, "_INFINIBAND", tmp_path / "none")
    caplog.set_level("INFO")
    assert start(monkeypatch, "auto") == ""
    assert "KV bytes move by Mooncake over tcp, from 127.0.0.1" in caplog.text
    with pytest.raises(ConfigError, match="no RDMA adapter mlx5_0, but none"):
        mooncake.open_mooncake("127.0.0.1", "auto", rdma_devices=("mlx5_0",))


def test_the_setting_is_a_list_of_names() -> None:
    worker = {"worker_id": "d", "model": "m", "rdma_devices": "mlx5_0, mlx5_1"}
    assert WorkerConfig.model_validate(worker).rdma_devices == ("mlx5_0", "mlx5_1")
    with pytest.raises(ValueError, match="ibv_devices"):
        WorkerConfig.model_validate(worker | {"rdma_devices": "../x"})
