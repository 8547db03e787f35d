"""The file of an incident: the events of all members, compressed. Each message has its length before it."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Sequence
from pathlib import Path

from google.protobuf import proto
from google.protobuf.message import DecodeError

from headrace.incident.v1 import incident_pb2
from headrace_common.errors import ConfigError

Parts = Sequence[incident_pb2.ListEventsResponse]


def read_incident(path: Path) -> dict[str, Parts]:
    """The messages of each member, by worker id. Raises ConfigError."""
    found: dict[str, list[incident_pb2.ListEventsResponse]] = {}
    try:
        content = gzip.decompress(path.read_bytes())
        data = io.BytesIO(content)
        while data.tell() < len(content):
            part = proto.parse_length_prefixed(incident_pb2.ListEventsResponse, data)
            found.setdefault(part.member.worker_id, []).append(part)
    except (OSError, EOFError, zlib.error, DecodeError, ValueError) as error:
        raise ConfigError(
            f"cannot read {path}: {error}; name a file of `headrace incident save`",
            metadata={"file": str(path)},
        ) from error
    return {name: found[name] for name in sorted(found)}


def events_of(parts: Parts) -> list[incident_pb2.Event]:
    """The events of one member, oldest first."""
    return [event for part in parts for event in part.events]
