"""What is removed from the environment of an image."""

from __future__ import annotations

from pathlib import Path

import pytest

from shrink_environment import shrink

KEPT = (
    "numpy/_core/_multiarray_umath.cpython-311-x86_64-linux-gnu.so",
    "numpy/__init__.py",
    "numpy/testing/__init__.py",
    "numpy/core.so",
    "numpy.libs/libx-1.so.5.0.0",
    "uvloop/loop.so",
    "uvloop/lib/libx.so.1.2",
    "tests/__init__.py",
    "grpc/py.typed",
    "grpc/roots.pem",
)
REMOVED = (
    "numpy/_core/_simd.cpython-311-x86_64-linux-gnu.so",
    "numpy/_core/_multiarray_tests.cpython-311-x86_64-linux-gnu.so",
    "numpy/tests/__init__.py",
    "numpy/core/tests/data/tests/x.py",
    "uvloop/loop.pyx",
    "uvloop/loop.pyi",
    "numpy/include/x.h",
    "numpy/lib/libx.a",
)


def test_tests_sources_and_stubs_are_removed_and_libraries_stripped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tmp_path / "environment" / "lib" / "python3.11" / "site-packages"
    for name in (*KEPT, *REMOVED):
        path = packages / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("12345")
    (packages / "uvloop" / "link.so").symlink_to("loop.so")
    programs = tmp_path / "programs"
    programs.mkdir()
    stripped = tmp_path / "stripped"
    (programs / "strip").write_text(f'#!/bin/sh\nfor last; do :; done\necho "$last" >>{stripped}\n')
    (programs / "strip").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")

    assert shrink(tmp_path / "environment") == 5 * len(REMOVED)
    assert {str(path.relative_to(packages)) for path in packages.rglob("*") if path.is_file()} == {
        *KEPT,
        "uvloop/link.so",
    }
    # Those of numpy have been rewritten before: strip would break them.
    assert stripped.read_text().splitlines() == [
        str(packages / "uvloop" / "lib" / "libx.so.1.2"),
        str(packages / "uvloop" / "loop.so"),
    ]
