"""The size of packages."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODULES_MAX = 14


def test_no_package_holds_more_modules_than_a_reader_surveys() -> None:
    modules = [
        path
        for folder in ("libs", "services")
        for path in (ROOT / folder).rglob("*.py")
        if path.name != "__init__.py" and not path.is_relative_to(ROOT / "libs" / "headrace")
    ]
    sizes = Counter(path.parent.relative_to(ROOT) for path in modules)
    assert sizes
    assert {str(name): size for name, size in sizes.items() if size > MODULES_MAX} == {}
