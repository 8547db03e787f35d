"""Parts that add up, whatever the steps are."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from headrace.inference.v1 import latency_pb2
from headrace_common.latency.parts import Claim, Sum, TimePart, divide, sum_from_proto, sum_to_proto

TIMES = st.integers(-50, 50)
CLAIMS = st.lists(
    st.tuples(st.sampled_from(TimePart), st.none() | TIMES, st.none() | TIMES), max_size=12
)


def counted(start: int, end: int, claims: list[Claim]) -> dict[TimePart, int]:
    """The parts by giving each microsecond to the first claim that contains it."""
    parts: dict[TimePart, int] = {}
    for time in range(start, end):
        owner = next(
            (
                part
                for part, low, high in claims
                if low is not None and high is not None and low <= time < high
            ),
            TimePart.UNACCOUNTED,
        )
        parts[owner] = parts.get(owner, 0) + 1
    return parts


@given(TIMES, TIMES, CLAIMS)
def test_parts_are_what_counting_finds(start: int, end: int, claims: list[Claim]) -> None:
    found = divide(start, end, claims)
    assert found.parts_us == counted(start, end, claims)
    assert sum(found.parts_us.values()) == found.total_us == max(0, end - start)
    assert all(duration > 0 for duration in found.parts_us.values())


@given(TIMES, TIMES, CLAIMS, st.randoms(use_true_random=False))
def test_claims_that_do_not_overlap_have_no_order(
    start: int, end: int, claims: list[Claim], rng: random.Random
) -> None:
    apart: list[Claim] = []
    for claim in claims:
        _, low, high = claim
        if low is None or high is None:
            continue
        if all(high <= other[1] or other[2] <= low for other in apart):  # type: ignore[operator]
            apart.append(claim)
    shuffled = rng.sample(apart, len(apart))
    assert divide(start, end, apart) == divide(start, end, shuffled)


@given(TIMES, TIMES, CLAIMS)
def test_a_sum_survives_its_message(start: int, end: int, claims: list[Claim]) -> None:
    found = divide(start, end, claims)
    assert sum_from_proto(sum_to_proto(found)) == found


def test_a_part_of_a_newer_version_is_unaccounted() -> None:
    message = latency_pb2.LatencySum(total_us=5)
    message.parts.add(part=99, duration_us=5)
    assert sum_from_proto(message) == Sum(5, {TimePart.UNACCOUNTED: 5})
