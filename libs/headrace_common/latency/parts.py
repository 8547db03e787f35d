"""Divides a time into parts that do not overlap and add up to it exactly. Pure.

Steps are claimed in an order: each claim gets what earlier claims have left of its interval. So a part is never
negative and the sum is never wrong, even if steps overlap, are missing, or lie beyond the ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

from headrace.inference.v1 import latency_pb2


class TimePart(IntEnum):
    """A part of the time to a token. The meanings are those of latency.proto."""

    ADMISSION = latency_pb2.LATENCY_PART_ADMISSION
    TOKENIZE = latency_pb2.LATENCY_PART_TOKENIZE
    ROUTE = latency_pb2.LATENCY_PART_ROUTE
    RETRY = latency_pb2.LATENCY_PART_RETRY
    RESERVE = latency_pb2.LATENCY_PART_RESERVE
    QUEUE = latency_pb2.LATENCY_PART_QUEUE
    BATCH_WAIT = latency_pb2.LATENCY_PART_BATCH_WAIT
    PREFILL = latency_pb2.LATENCY_PART_PREFILL
    TRANSFER_EXPOSED = latency_pb2.LATENCY_PART_TRANSFER_EXPOSED
    DECODE_WAIT = latency_pb2.LATENCY_PART_DECODE_WAIT
    FIRST_STEP = latency_pb2.LATENCY_PART_FIRST_STEP
    NETWORK = latency_pb2.LATENCY_PART_NETWORK
    UNACCOUNTED = latency_pb2.LATENCY_PART_UNACCOUNTED

    # That of Enum is a Python function, and parts are keys.
    __hash__ = int.__hash__

    @property
    def label(self) -> str:
        """The name in telemetry, such as "transfer_exposed"."""
        return _LABELS[self]


_LABELS = {part: part.name.lower() for part in TimePart}
# A member of an Enum is found by a Python function.
_REST = TimePart.UNACCOUNTED


Claim: TypeAlias = tuple[TimePart, int | None, int | None]
"""One step with its start and end. A step without a duration, or without one of both, claims nothing."""


@dataclass(frozen=True, slots=True)
class Sum:
    """A time in microseconds and its parts, which add up to it. Parts without time are left out."""

    total_us: int
    parts_us: Mapping[TimePart, int]

    def __getitem__(self, part: TimePart) -> int:
        """Microseconds of a part."""
        return self.parts_us.get(part, 0)


def divide(start_us: int, end_us: int, claims: Iterable[Claim]) -> Sum:
    """Divides [start_us, end_us) among the claims, in their order. The rest is UNACCOUNTED."""
    parts: dict[TimePart, int] = {}
    free = [(start_us, end_us)] if end_us > start_us else []
    for part, start, end in claims:
        if start is None or end is None or end <= start:
            continue
        taken_us = 0
        left: list[tuple[int, int]] = []
        for gap in free:
            low, high = gap
            if end <= low or high <= start:
                left.append(gap)
                continue
            if low < start:
                left.append((low, start))
                low = start
            if end < high:
                left.append((end, high))
                high = end
            taken_us += high - low
        if taken_us:
            parts[part] = parts.get(part, 0) + taken_us
            free = left
    rest = sum([gap_end - gap_start for gap_start, gap_end in free])
    if rest:
        parts[_REST] = parts.get(_REST, 0) + rest
    return Sum(max(0, end_us - start_us), parts)


def sum_to_proto(one: Sum) -> latency_pb2.LatencySum:
    """The parts in the order of LatencyPart."""
    message = latency_pb2.LatencySum(total_us=one.total_us)
    for part, duration_us in sorted(one.parts_us.items()):
        message.parts.add(part=part.value, duration_us=duration_us)
    return message


def sum_from_proto(message: latency_pb2.LatencySum) -> Sum:
    """The inverse of sum_to_proto. Parts of a newer version count as UNACCOUNTED."""
    parts: dict[TimePart, int] = {}
    for one in message.parts:
        part = TimePart(one.part) if int(one.part) in _NUMBERS else TimePart.UNACCOUNTED
        parts[part] = parts.get(part, 0) + one.duration_us
    return Sum(message.total_us, parts)


_NUMBERS = frozenset(int(part) for part in TimePart)
