"""The result of one check."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """A warning needs attention later. An error means that something does not work, or is open to others."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found about a subject. `remedy` is empty where nothing is wrong."""

    verdict: Verdict
    subject: str
    detail: str
    remedy: str = ""
