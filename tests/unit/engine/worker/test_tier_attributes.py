"""Spans name the tiers that cached tokens came from."""

from __future__ import annotations

from headrace_common.telemetry import schema
from headrace_engine.worker.metrics import tier_attributes
from headrace_kv.prefix.events import Tier


def test_each_tier_with_tokens_has_an_attribute() -> None:
    assert tier_attributes({}) == {}
    assert tier_attributes({Tier.DISK: 8, Tier.REMOTE: 16, Tier.HOST: 0}) == {
        schema.ATTRIBUTE_DISK_TOKENS: 8,
        schema.ATTRIBUTE_REMOTE_TOKENS: 16,
    }
