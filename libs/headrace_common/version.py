"""The version of Headrace. pyproject.toml states it, and nothing else does."""

from __future__ import annotations

import tomllib
from functools import lru_cache
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path

DISTRIBUTION = "headrace"
_CHECKOUT = Path(__file__).resolve().parents[2]


@lru_cache(maxsize=1)
def version() -> str:
    """The version that is installed, or in a checkout without an installation that of pyproject.toml."""
    try:
        return installed_version(DISTRIBUTION)
    except PackageNotFoundError:
        return checkout_version(_CHECKOUT / "pyproject.toml")


def checkout_version(path: Path) -> str:
    """The version in the pyproject.toml of Headrace at `path`; "unknown" where there is none."""
    try:
        project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
    except (OSError, tomllib.TOMLDecodeError, KeyError):
        return "unknown"
    return str(project["version"]) if project.get("name") == DISTRIBUTION else "unknown"
