"""The comparison of `headrace doctor` with what the kernel has can fail."""

from __future__ import annotations

from typing import Any

import pytest

from tests.rdma.doctor import check_down, check_found, check_host

ADDRESS = "10.99.0.1"
PORT: dict[str, Any] = {
    "verdict": "ok",
    "subject": "RDMA rxe0/1",
    "detail": f"active, Ethernet, 2.5 Gb/sec (1X SDR); GID 1 is RoCE v2 for {ADDRESS}",
    "remedy": None,
}
READY: list[dict[str, Any]] = [
    PORT,
    {"verdict": "ok", "subject": "RDMA device files", "detail": "", "remedy": None},
    {"verdict": "ok", "subject": "locked memory", "detail": "", "remedy": None},
]
ABSENT: dict[str, Any] = {
    "verdict": "warning",
    "subject": "RDMA",
    "detail": "this host has no RDMA adapter, so KV moves over TCP",
    "remedy": "`modprobe rdma_rxe`",
}


def changed(finding: dict[str, Any], **fields: object) -> dict[str, Any]:
    return {**finding, **fields}


def test_a_device_with_link_and_gid_is_found() -> None:
    assert ADDRESS in check_found(READY, ADDRESS)
    for wrong in (
        [ABSENT],
        READY[:1],
        [changed(PORT, subject="RDMA rxe1/1"), *READY[1:]],
        [changed(PORT, verdict="warning"), *READY[1:]],
        [changed(PORT, detail="active, InfiniBand, 100 Gb/sec"), *READY[1:]],
        [changed(PORT, detail=str(PORT["detail"]) + "7"), *READY[1:]],
        [*READY[:2], changed(READY[2], verdict="warning")],
    ):
        with pytest.raises(AssertionError):
            check_found(wrong, ADDRESS)


def test_a_device_without_a_link_is_found() -> None:
    down = changed(
        PORT, verdict="warning", detail="the port is DOWN", remedy="leave rxe0 out of rdma_devices"
    )
    assert "DOWN" in check_down([down])
    for wrong in (PORT, changed(down, remedy=None), ABSENT):
        with pytest.raises(AssertionError):
            check_down([wrong])


def test_a_host_has_its_adapters_or_a_remedy() -> None:
    assert "no RDMA adapter" in check_host([ABSENT], [])
    assert check_host([PORT], ["rxe0"]) == "found rxe0"
    for findings, adapters in (
        ([PORT], []),
        ([ABSENT, PORT], []),
        ([changed(ABSENT, remedy=None)], []),
        ([ABSENT], ["rxe0"]),
        ([PORT], ["rxe0", "mlx5_0"]),
    ):
        with pytest.raises(AssertionError):
            check_host(findings, adapters)
