"""What torch does not tell of CUDA's driver: how writes of network adapters into a device's memory become visible.

An adapter's write is acknowledged when it has left the adapter. On some machines it may then still be on its way to the
device, and work that starts right afterwards would read what was there before.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from headrace_common.errors import ConfigError, TransferFailed

# Of cuda.h: CUdevice_attribute, CUGPUDirectRDMAWritesOrdering, CUflushGPUDirectRDMAWritesOptions, -Target and -Scope.
RDMA_SUPPORTED = 116
FLUSH_OPTIONS = 117
WRITES_ORDERING = 118
ORDERED_FOR_OWNER = 100
FLUSH_BY_HOST = 1
OF_CURRENT_CONTEXT = 0
TO_OWNER = 100


def load_driver() -> Any:
    """CUDA's driver library. Raises ConfigError where there is none."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise ConfigError(f"CUDA's driver cannot be loaded: {error}") from error


def open_flush(driver: Any, device_number: int) -> Callable[[], None] | None:
    """What makes acknowledged writes visible to the device's work from then on; None where they are at once.

    The calling thread must have a CUDA context of the device; the flush raises TransferFailed when it fails.
    Raises ConfigError where the device's memory is not for adapters, or nothing tells when writes are visible.
    """
    if not _attribute(driver, RDMA_SUPPORTED, device_number):
        raise ConfigError(f"adapters cannot reach the memory of CUDA device {device_number}")
    if _attribute(driver, WRITES_ORDERING, device_number) >= ORDERED_FOR_OWNER:
        return None
    if not _attribute(driver, FLUSH_OPTIONS, device_number) & FLUSH_BY_HOST:
        raise ConfigError(
            f"CUDA device {device_number} does not tell when adapters' writes are visible"
        )

    def flush() -> None:
        code = driver.cuFlushGPUDirectRDMAWrites(OF_CURRENT_CONTEXT, TO_OWNER)
        if code != 0:
            raise TransferFailed(
                f"CUDA device {device_number} did not say that adapters' writes are visible (code {code})"
            )

    return flush


def _attribute(driver: Any, attribute: int, device_number: int) -> int:
    device, value = ctypes.c_int(), ctypes.c_int()
    for code in (
        driver.cuDeviceGet(ctypes.byref(device), device_number),
        driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device),
    ):
        if code != 0:
            raise ConfigError(f"CUDA device {device_number} cannot be asked (code {code})")
    return value.value
