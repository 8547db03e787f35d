"""Mutations that change nothing a caller can see, each with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

EQUIVALENT: Final[Mapping[str, str]] = {}
"""Reasons by Site.key."""
