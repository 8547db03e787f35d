"""Where a worker runs: labels of zone, rack and host. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from headrace.registry.v1 import registry_pb2

LABEL_REMEDY: Final = "give at most 63 characters of A-Z, a-z, 0-9, '.', '_' and '-'"
_LABEL: Final = re.compile(r"[A-Za-z0-9._-]{0,63}")
_NAMES: Final = ("zone", "rack", "host")


class Level(IntEnum):
    """A level of places, numbered as PairLevel in registry.proto."""

    NONE = registry_pb2.PAIR_LEVEL_UNSPECIFIED
    ZONE = registry_pb2.PAIR_LEVEL_ZONE
    RACK = registry_pb2.PAIR_LEVEL_RACK
    HOST = registry_pb2.PAIR_LEVEL_HOST


@dataclass(frozen=True, slots=True)
class Place:
    """A label is empty where it is unknown. At level ZONE, a place is its zone alone."""

    zone: str = ""
    rack: str = ""
    host: str = ""

    def at(self, level: Level) -> Place | None:
        """The place at a level. None where its label is unknown, or for no level."""
        labels = (self.zone, self.rack, self.host)
        if level is Level.NONE or not labels[level - 1]:
            return None
        return Place(*labels[:level])


def place_of(entries: Iterable[str]) -> registry_pb2.Place:
    """The place of texts such as "zone=eu-1a". Raises ValueError."""
    labels: dict[str, str] = {}
    for entry in entries:
        name, equals, label = entry.partition("=")
        if not equals or name not in _NAMES or name in labels:
            raise ValueError(
                f"{entry!r}: give each of zone, rack and host once at most, such as zone=a,rack=r7"
            )
        if not is_label(label):
            raise ValueError(f"{entry!r}: {LABEL_REMEDY}")
        labels[name] = label
    return registry_pb2.Place(**labels)


def is_label(text: str) -> bool:
    """Whether `text` may be a label, or is empty."""
    return _LABEL.fullmatch(text) is not None


def place_from_proto(message: registry_pb2.Place) -> Place:
    """Converts a place that a worker announces."""
    return Place(message.zone, message.rack, message.host)


def place_violations(message: registry_pb2.Place, path: str) -> dict[str, str]:
    """The remedy for each wrong label."""
    return {f"{path}.{one}": LABEL_REMEDY for one in _NAMES if not is_label(getattr(message, one))}
