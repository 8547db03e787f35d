"""The tiers that a request's cached tokens came from, as attributes of its spans. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from headrace_common.telemetry import schema
from headrace_kv.prefix.events import Tier

_NAMES: Final = {
    Tier.HOST: schema.ATTRIBUTE_HOST_TOKENS,
    Tier.DISK: schema.ATTRIBUTE_DISK_TOKENS,
    Tier.REMOTE: schema.ATTRIBUTE_REMOTE_TOKENS,
}


def tier_attributes(tier_tokens: Mapping[Tier, int]) -> dict[str, int]:
    """An attribute for each tier below KV memory with tokens. See PrefillOutcome.tier_tokens."""
    return {_NAMES[tier]: count for tier, count in tier_tokens.items() if count and tier in _NAMES}
