"""Makes writes of network adapters into a device's memory visible, with calls of the CUDA driver that torch lacks.

A write is acknowledged when it has left the adapter. On some machines it may then not have reached the device, and work
that starts right afterwards would read old bytes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from headrace_common.errors import ConfigError, TransferFailed

# From cuda.h: CUdevice_attribute, CUGPUDirectRDMAWritesOrdering, CUflushGPUDirectRDMAWritesOptions, -Target and -Scope.
RDMA_SUPPORTED = 116
FLUSH_OPTIONS = 117
WRITES_ORDERING = 118
ORDERED_FOR_OWNER = 100
FLUSH_BY_HOST = 1
OF_CURRENT_CONTEXT = 0
TO_OWNER = 100


def load_driver() -> Any:
    """The CUDA driver library. Raises ConfigError where there is none."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise ConfigError(f"CUDA's driver cannot be loaded: {error}") from error


def open_flush(driver: Any, device_number: int) -> Callable[[], None] | None:
    """A function that makes acknowledged writes visible to work that is queued after it. None where it is not needed.

    The thread that calls it must have a CUDA context of the device. It raises TransferFailed when it fails.
    Raises ConfigError where adapters cannot reach the device's memory, or the device cannot make writes visible.
    """
    if not _attribute(driver, RDMA_SUPPORTED, device_number):
        raise ConfigError(f"adapters cannot reach the memory of CUDA device {device_number}")
    if _attribute(driver, WRITES_ORDERING, device_number) >= ORDERED_FOR_OWNER:
        return None
    if not _attribute(driver, FLUSH_OPTIONS, device_number) & FLUSH_BY_HOST:
        raise ConfigError(f"CUDA device {device_number} cannot make adapters' writes visible")

    def flush() -> None:
        code = driver.cuFlushGPUDirectRDMAWrites(OF_CURRENT_CONTEXT, TO_OWNER)
        if code != 0:
            raise TransferFailed(
                f"CUDA device {device_number} failed to make adapters' writes visible (code {code})"
            )

    return flush


def _attribute(driver: Any, attribute: int, device_number: int) -> int:
    device, value = ctypes.c_int(), ctypes.c_int()
    for code in (
        driver.cuDeviceGet(ctypes.byref(device), device_number),
        driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device),
    ):
        if code != 0:
            raise ConfigError(
                f"CUDA device {device_number} has no readable attributes (code {code})"
            )
    return value.value
