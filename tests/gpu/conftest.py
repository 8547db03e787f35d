"""Devices for the tests of this folder: tensors of the CPU, and of a GPU where there is one."""

from __future__ import annotations

import pytest

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.vllm),
    pytest.param("cuda:0", marks=[pytest.mark.vllm, pytest.mark.gpu]),
]


@pytest.fixture(scope="session", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """A device by its name in torch, which is imported only where a test needs it."""
    torch = pytest.importorskip("torch")
    if request.param != "cpu" and not torch.cuda.is_available():
        built = torch.version.cuda
        pytest.skip("there is no CUDA device" if built else "this torch is built without CUDA")
    return str(request.param)
