"""A file beside the link's socket that holds the error of an engine process that cannot start."""

from __future__ import annotations

import json
from pathlib import Path

from headrace_common.errors import HeadraceError, from_reason


def _file(link_path: Path) -> Path:
    return link_path.with_name("failure.json")


def write_startup_error(link_path: Path, error: HeadraceError) -> None:
    """Stores the error for `read_startup_error`, unless there is one already."""
    file = _file(link_path)
    if not file.exists():
        file.write_text(
            json.dumps(
                {"reason": error.reason, "detail": error.detail, "metadata": error.metadata}
            ),
            encoding="utf-8",
        )


def read_startup_error(link_path: Path) -> HeadraceError | None:
    """The stored error, or None."""
    try:
        stored = json.loads(_file(link_path).read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return from_reason(stored["reason"], stored["detail"], metadata=stored["metadata"])
