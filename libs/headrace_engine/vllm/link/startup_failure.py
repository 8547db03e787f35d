"""A note beside the link's socket, by which an engine process that cannot start says why."""

from __future__ import annotations

import json
from pathlib import Path

from headrace_common.errors import HeadraceError
from headrace_engine.vllm.reasons import error_of


def _note(link_path: Path) -> Path:
    return link_path.with_name("failure.json")


def write_failure(link_path: Path, error: HeadraceError) -> None:
    """Leaves the error for `read_failure`. The first one counts."""
    note = _note(link_path)
    if not note.exists():
        note.write_text(
            json.dumps(
                {"reason": error.reason, "detail": error.detail, "metadata": error.metadata}
            ),
            encoding="utf-8",
        )


def read_failure(link_path: Path) -> HeadraceError | None:
    """What an engine process left, or None."""
    try:
        said = json.loads(_note(link_path).read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return error_of(said["reason"], said["detail"], said["metadata"])
