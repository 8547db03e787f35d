"""Counts the calls of Python functions of the product in a process, when HEADRACE_CALLS names a folder.

Python imports this module at its start where its folder is on PYTHONPATH. The counts are written when the process ends.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

FOLDER_VARIABLE = "HEADRACE_CALLS"
_ROOT = Path(__file__).resolve().parents[2]
_counts: dict[CodeType, int] = {}


def _count(frame: FrameType, event: str, _: Any) -> None:
    if event == "call":
        _counts[frame.f_code] = _counts.get(frame.f_code, 0) + 1


def _write(folder: str) -> None:
    sys.setprofile(None)
    calls: Counter[str] = Counter()
    for code, count in list(_counts.items()):
        path = Path(code.co_filename)
        if path.is_relative_to(_ROOT / "services") or path.is_relative_to(_ROOT / "libs"):
            calls[f"{path.relative_to(_ROOT)}:{code.co_qualname}"] += count
    service = Path(sys.argv[0]).parent.name
    (Path(folder) / f"{service}.{os.getpid()}.json").write_text(json.dumps(calls))


if FOLDER_VARIABLE in os.environ:
    atexit.register(_write, os.environ[FOLDER_VARIABLE])
    threading.setprofile(_count)
    sys.setprofile(_count)
