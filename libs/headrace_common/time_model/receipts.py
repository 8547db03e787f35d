"""Sums of receipts. Pure."""

from __future__ import annotations

from typing import Final

from headrace.inference.v1 import receipt_pb2

NUMBERS: Final = tuple(
    field.name for field in receipt_pb2.Receipt.DESCRIPTOR.fields if field.message_type is None
)


def add_receipt(total: receipt_pb2.Receipt, one: receipt_pb2.Receipt) -> None:
    """Adds all but the links."""
    for name in NUMBERS:
        if value := getattr(one, name):
            setattr(total, name, getattr(total, name) + value)
    for use in one.kv:
        known = next((known for known in total.kv if known.tier == use.tier), None)
        if known is None:
            known = total.kv.add(tier=use.tier)
        known.byte_seconds += use.byte_seconds
