"""Ids of workers, of their incarnations and of transfers."""

from __future__ import annotations

import os
import re

_WORKER_ID = re.compile(r"[a-z0-9._-]{1,63}")
_INCARNATION = re.compile(r"[0-9a-f]{16}")


def new_incarnation() -> str:
    """A random id for one start of a worker: 16 hex characters."""
    return os.urandom(8).hex()


def new_transfer_id() -> str:
    """A random id for one transfer: "x" and 32 hex characters."""
    return "x" + os.urandom(16).hex()


def is_incarnation(text: str) -> bool:
    """Whether `text` has the form that `new_incarnation` gives."""
    return _INCARNATION.fullmatch(text) is not None


def is_worker_id(text: str) -> bool:
    """Whether `text` is a worker id: 1 to 63 of a-z, 0-9, dot, underscore and hyphen."""
    return _WORKER_ID.fullmatch(text) is not None
