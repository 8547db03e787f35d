"""Mutations that change nothing a caller can see, each with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

EQUIVALENT: Final[Mapping[str, str]] = {
    "plan/runs.py Runs.sort_and_merge: np.diff(self.source_addresses) >= 0 -> "
    "np.diff(self.source_addresses) > 0": (
        "differs only for equal source addresses, which no plan has"
    ),
}
"""Reasons by Site.key."""
