"""The parts of a latency as the client sees it."""

from __future__ import annotations

from headrace.inference.v1 import latency_pb2
from headrace_common.latency.parts import Part, Sum, sum_from_proto, sum_to_proto


def complete_latency(
    latency: latency_pb2.LatencyBreakdown, measured_us: int, retry_us: int
) -> None:
    """Extends the router's first sum to the time that the client measured.

    `retry_us` of it passed before the call that succeeded. The rest that the router has not seen is the network's.
    """
    known = sum_from_proto(latency.first_token)
    parts = dict(known.parts_us)
    missing_us = max(0, measured_us - known.total_us)
    retry_us = min(missing_us, retry_us)
    for part, more_us in ((Part.RETRY, retry_us), (Part.NETWORK, missing_us - retry_us)):
        if more_us:
            parts[part] = parts.get(part, 0) + more_us
    latency.first_token.CopyFrom(sum_to_proto(Sum(known.total_us + missing_us, parts)))
