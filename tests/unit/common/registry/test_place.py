"""Labels of zone, rack and host."""

from __future__ import annotations

import string

from hypothesis import given
from hypothesis import strategies as st

from headrace.registry.v1 import registry_pb2
from headrace_common.registry.place import (
    Level,
    Place,
    place_from_proto,
    place_of,
    place_violations,
)

LABELS = st.sampled_from(["", "a", "b"])
PLACES = st.builds(Place, LABELS, LABELS, LABELS)
LEVELS = st.sampled_from([Level.ZONE, Level.RACK, Level.HOST])


@given(PLACES, PLACES, LEVELS)
def test_places_at_a_level_are_equal_when_all_labels_down_to_it_are(
    one: Place, other: Place, level: Level
) -> None:
    def labels(place: Place) -> tuple[str, ...]:
        return (place.zone, place.rack, place.host)[:level]

    shared = labels(one) == labels(other) and labels(one)[-1] != ""
    found = one.at(level)
    assert (found is not None and found == other.at(level)) == shared
    assert one.at(Level.NONE) is None


def test_a_place_is_read_and_survives_the_wire() -> None:
    assert place_from_proto(place_of(["rack=r", "zone=z"])) == Place("z", "r")


def test_labels_are_bounded() -> None:
    good = registry_pb2.Place(zone=(string.ascii_letters + "09._-")[-63:], rack="r" * 63)
    assert place_violations(good, "place") == {}
    bad = registry_pb2.Place(zone="a b", rack="r" * 64, host="ü")
    assert set(place_violations(bad, "place")) == {"place.zone", "place.rack", "place.host"}
