"""Visibility of adapters' writes, with a fake CUDA driver and without torch."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from headrace_common.errors import ConfigError, TransferFailed
from headrace_engine.torch_memory.stream_order import (
    FLUSH_OPTIONS,
    ORDERED_FOR_OWNER,
    RDMA_SUPPORTED,
    WRITES_ORDERING,
    load_driver,
    open_flush,
)


class Driver:
    """Has one device, with number 3 and handle 30."""

    def __init__(self, code: int = 0, **attributes: int) -> None:
        self.attributes = {RDMA_SUPPORTED: 1, WRITES_ORDERING: 0, FLUSH_OPTIONS: 1}
        names = {"rdma": RDMA_SUPPORTED, "ordering": WRITES_ORDERING, "flush": FLUSH_OPTIONS}
        self.attributes |= {names[name]: value for name, value in attributes.items()}
        self.code = code
        self.flushes: list[tuple[int, int]] = []

    def cuDeviceGet(self, device: Any, number: int) -> int:
        ctypes.cast(device, ctypes.POINTER(ctypes.c_int))[0] = 30
        return 0 if number == 3 else 101

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: ctypes.c_int) -> int:
        assert device.value == 30
        ctypes.cast(value, ctypes.POINTER(ctypes.c_int))[0] = self.attributes[attribute]
        return 0

    def cuFlushGPUDirectRDMAWrites(self, target: int, scope: int) -> int:
        self.flushes.append((target, scope))
        return self.code


def test_unordered_writes_are_flushed_for_the_device_that_owns_the_memory() -> None:
    driver = Driver()
    flush = open_flush(driver, 3)
    assert flush is not None
    assert driver.flushes == []
    flush()
    assert driver.flushes == [(0, 100)]


@pytest.mark.parametrize("ordering", [ORDERED_FOR_OWNER, 200])
def test_ordered_writes_need_no_flush(ordering: int) -> None:
    assert open_flush(Driver(ordering=ordering, flush=0), 3) is None


def test_writes_that_cannot_be_ordered_are_rejected() -> None:
    with pytest.raises(ConfigError, match="visible"):
        open_flush(Driver(flush=2), 3)
    with pytest.raises(ConfigError, match="cannot reach"):
        open_flush(Driver(rdma=0), 3)
    with pytest.raises(ConfigError, match=r"no readable attributes \(code 101\)"):
        open_flush(Driver(), 4)


def test_a_failed_flush_raises() -> None:
    flush = open_flush(Driver(code=700), 3)
    assert flush is not None
    with pytest.raises(TransferFailed, match="700"):
        flush()


def test_a_missing_driver_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(ConfigError, match=r"libcuda\.so\.1"):
        load_driver()
