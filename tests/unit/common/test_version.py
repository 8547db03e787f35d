"""The version: the installed one, or that of the checkout."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from headrace_common import version as version_module
from headrace_common.version import checkout_version, version

PYPROJECT = Path(__file__).resolve().parents[3] / "pyproject.toml"


@pytest.fixture(autouse=True)
def _no_cache() -> None:
    version.cache_clear()


def test_a_checkout_without_an_installation_has_the_version_of_pyproject(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def not_installed(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(version_module, "installed_version", not_installed)
    monkeypatch.setattr(version_module, "checkout_version", lambda path: f"of {path}")

    assert version() == f"of {PYPROJECT}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[project]\nname = "headrace"\nversion = "3.2.1"\n', "3.2.1"),
        ('[project]\nname = "other"\nversion = "3.2.1"\n', "unknown"),
        ("[tool.ruff]\n", "unknown"),
        ("[[[", "unknown"),
    ],
)
def test_only_the_pyproject_of_headrace_states_the_version(
    tmp_path: Path, text: str, expected: str
) -> None:
    path = tmp_path / "pyproject.toml"
    path.write_text(text, encoding="utf-8")

    assert checkout_version(path) == expected
