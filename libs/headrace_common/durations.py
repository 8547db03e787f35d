"""Conversion between seconds and protobuf's Duration and Timestamp. Pure."""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

_NS_PER_S = 1_000_000_000
# 10,000 years: duration.proto.
_SECONDS_MAX = 315_576_000_000


def duration_from_seconds(seconds: float) -> Duration:
    """The Duration of `seconds`, to the nanosecond. Values beyond the type become its nearest one, negative ones 0."""
    return duration_from_ns(round(min(max(0.0, seconds), _SECONDS_MAX) * _NS_PER_S))


def duration_from_ns(nanoseconds: int) -> Duration:
    """The Duration of `nanoseconds`. A negative value becomes 0."""
    seconds, rest_ns = divmod(max(0, nanoseconds), _NS_PER_S)
    return Duration(seconds=seconds, nanos=rest_ns)


def seconds_from_duration(duration: Duration) -> float:
    """The Duration in seconds."""
    return duration.ToNanoseconds() / _NS_PER_S


def ns_from_duration(duration: Duration) -> int:
    """The Duration in nanoseconds."""
    return duration.ToNanoseconds()


def timestamp_from_unix_ns(unix_ns: int) -> Timestamp:
    """The Timestamp of Unix nanoseconds."""
    timestamp = Timestamp()
    timestamp.FromNanoseconds(unix_ns)
    return timestamp


def timestamp_from_unix_s(unix_s: float) -> Timestamp:
    """The Timestamp of Unix seconds, to the nanosecond."""
    return timestamp_from_unix_ns(round(unix_s * _NS_PER_S))


def unix_ns_from_timestamp(timestamp: Timestamp) -> int:
    """The Timestamp in Unix nanoseconds. Protobuf's own conversion refuses some that a caller may send."""
    return timestamp.seconds * _NS_PER_S + timestamp.nanos


def unix_s_from_timestamp(timestamp: Timestamp) -> float:
    """The Timestamp in Unix seconds."""
    return unix_ns_from_timestamp(timestamp) / _NS_PER_S
