"""The receipt of a request, from those of its attempts. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from opentelemetry.util.types import AttributeValue

from headrace.inference.v1 import receipt_pb2
from headrace_common.errors import Cancelled, DeadlineExceeded, InvalidRequest
from headrace_common.telemetry import schema
from headrace_common.time_model.receipts import NUMBERS, add_receipt

RECEIPT_FIELD: Final = "headrace_receipt"
"""With the receipt, in the usage of answers over HTTP."""
_TIERS: Final = frozenset(("device", "host", "disk", "remote"))
_MOST: Final = 10**12
_BYTE_SECONDS_MOST: Final = 1e15
"""What a worker reports of one request counts as these at most, so that no sum overflows."""
_OF_CLIENTS: Final = frozenset(
    {"", Cancelled.reason, DeadlineExceeded.reason, InvalidRequest.reason}
)
"""Errors with which an attempt ends through its client. Other ones are faults."""


class AttemptReceipt(NamedTuple):
    """What is known of the cost of one attempt. `generated_tokens`: those of earlier attempts, which it continues."""

    parts: Sequence[receipt_pb2.Receipt]
    reason: str
    """That of its error. Empty without one."""
    generated_tokens: int
    links: Sequence[receipt_pb2.LinkUse] = ()


def device_us(receipt: receipt_pb2.Receipt) -> int:
    """The device time of a worker's part."""
    return receipt.prefill_device_us + receipt.decode_device_us


def receipt_of(attempts: Iterable[AttemptReceipt]) -> receipt_pb2.Receipt:
    """The receipt of a request. The device time of attempts that failed by a fault is the operator's."""
    count = moves = operator_us = prefill_us = decode_us = computed = cached = recomputed = 0
    kv: dict[str, float] = {}
    links: list[receipt_pb2.LinkUse] = []
    lost_tokens = False
    for attempt in attempts:
        failed, before = attempt.reason not in _OF_CLIENTS, computed
        for part in attempt.parts:
            computed += min(part.computed_tokens, _MOST)
            cached += min(part.cached_tokens, _MOST)
            if failed:
                operator_us += min(device_us(part), _MOST)
                continue
            prefill_us += min(part.prefill_device_us, _MOST)
            decode_us += min(part.decode_device_us, _MOST)
            for use in part.kv:
                if use.tier in _TIERS:
                    used = min(max(use.byte_seconds, 0.0), _BYTE_SECONDS_MOST)
                    kv[use.tier] = kv.get(use.tier, 0.0) + used
        count += 1
        moves += attempt.generated_tokens > 0
        if lost_tokens or attempt.generated_tokens:
            recomputed += computed - before
        lost_tokens |= failed and computed > before
        links += attempt.links
    return receipt_pb2.Receipt(
        prefill_device_us=prefill_us,
        decode_device_us=decode_us,
        kv=[receipt_pb2.KvUse(tier=tier, byte_seconds=one) for tier, one in kv.items()],
        computed_tokens=computed,
        cached_tokens=cached,
        recomputed_tokens=recomputed,
        operator_device_us=operator_us,
        attempts=count,
        moves=moves,
        links=links,
    )


def receipt_field(receipts: Sequence[receipt_pb2.Receipt]) -> dict[str, Any]:
    """The sum of the receipts of an answer's choices, as a field of its usage over HTTP, without names of workers.

    Nothing where no worker has reported a cost.
    """
    if not any(device_us(one) + one.operator_device_us for one in receipts):
        return {}
    total = receipt_pb2.Receipt()
    for one in receipts:
        add_receipt(total, one)
        total.links.extend(one.links)
    return {
        RECEIPT_FIELD: {
            **{name: getattr(total, name) for name in NUMBERS},
            "kv_byte_seconds": {use.tier: use.byte_seconds for use in total.kv},
            "sent_bytes": sum(link.payload_bytes for link in total.links),
        }
    }


def receipt_attributes(receipt: receipt_pb2.Receipt) -> dict[str, AttributeValue]:
    """Those of a request's span."""
    found = receipt_field([receipt])
    if not found:
        return {}
    text = ", ".join(f"{name}={value}" for name, value in found[RECEIPT_FIELD].items())
    return {schema.ATTRIBUTE_RECEIPT: text}
