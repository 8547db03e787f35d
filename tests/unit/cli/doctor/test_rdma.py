"""The check of RDMA adapters, on trees like those of the kernel."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from headrace_cli.checks import Finding, Verdict
from headrace_cli.commands import doctor
from headrace_cli.commands.doctor import check_rdma

_LINK_LOCAL = "fe80:0000:0000:0000:0a00:27ff:fe00:0001"
_MAPPED = "0000:0000:0000:0000:0000:ffff:0a00:0007"


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host with one adapter of RoCE, a device file and unlimited locked memory."""
    port = tmp_path / "infiniband" / "mlx5_0" / "ports" / "1"
    write(port / "state", "4: ACTIVE")
    write(port / "link_layer", "Ethernet")
    write(port / "rate", "100 Gb/sec (4X EDR)")
    for index, (gid, kind) in enumerate(((_LINK_LOCAL, "RoCE v2"), (_MAPPED, "RoCE v2"))):
        write(port / "gids" / str(index), gid)
        write(port / "gid_attrs" / "types" / str(index), kind)
    write(tmp_path / "dev" / "uverbs0", "")
    write(tmp_path / "huge", "[always] madvise never")
    monkeypatch.setattr(doctor, "_CLASS", tmp_path / "infiniband")
    monkeypatch.setattr(doctor, "_DEVICES", tmp_path / "dev")
    monkeypatch.setattr(doctor, "_HUGE_PAGES", tmp_path / "huge")
    monkeypatch.setattr(doctor, "_NVIDIA", tmp_path / "nvidia")
    monkeypatch.setattr(doctor, "_PEER_MEMORY", tmp_path / "nvidia_peermem")
    limit_locked_memory(monkeypatch, resource.RLIM_INFINITY)
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def limit_locked_memory(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))


def found(subject: str) -> Finding:
    (finding,) = [one for one in check_rdma() if one.subject == subject]
    return finding


@pytest.mark.parametrize(
    "file,text,named",
    [
        ("state", "1: DOWN", "DOWN"),
        ("gid_attrs/types/1", "IB/RoCE v1", "without a GID"),
        ("gids/1", "not a gid", "without a GID"),
    ],
)
def test_a_port_that_others_cannot_reach_is_named(
    host: Path, file: str, text: str, named: str
) -> None:
    write(host / "infiniband" / "mlx5_0" / "ports" / "1" / file, text)
    finding = found("RDMA mlx5_0/1")
    assert finding.verdict is Verdict.WARNING
    assert named in finding.detail
    assert finding.remedy


def test_device_files_that_are_missing_or_closed_are_an_error(
    host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert "uverbs0" in found("RDMA device files").detail
    (host / "dev" / "uverbs0").unlink()
    finding = found("RDMA device files")
    assert finding.verdict is Verdict.ERROR
    assert "no uverbs" in finding.detail


def test_a_limit_on_locked_memory_matters_with_an_adapter_only(
    host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_locked_memory(monkeypatch, 8 << 20)
    finding = found("locked memory")
    assert (finding.verdict, "8,192 KiB" in finding.detail) == (Verdict.WARNING, True)
    (host / "infiniband").rename(host / "other")
    assert found("locked memory").verdict is Verdict.OK
