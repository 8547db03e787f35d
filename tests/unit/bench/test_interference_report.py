"""The statistics of interference.py."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree as ET

from bench.interference.report import (
    OURS,
    Block,
    draw,
    gaps_of,
    p99_ms,
    stalled_share,
    table,
    targets,
)

MS = 1_000_000
CALM = Block(10, tuple([20.0] * 98 + [30.0] * 2), tokens=100, asked=10, answered=9, first_ms=(900,))
STALLED = Block(
    10, tuple([20.0] * 90 + [800.0] * 10), tokens=100, asked=10, answered=10, first_ms=(700, 900)
)
OTHER = "two engines"


def test_gaps_are_those_that_end_in_the_window() -> None:
    times_ns = [0, 10 * MS, 30 * MS, 30 * MS, 90 * MS]
    assert gaps_of(times_ns, 10 * MS, 90 * MS) == [10.0, 20.0, 0.0]
    assert gaps_of(times_ns[:1], 0, 90 * MS) == []


def test_percentiles_are_of_all_blocks_together() -> None:
    assert p99_ms([CALM]) == 30.0
    assert p99_ms([CALM, STALLED]) == 800.0


def test_a_rare_long_gap_counts_by_its_length() -> None:
    rare = replace(CALM, gaps_ms=(*[10.0] * 200, 2_000.0))
    assert p99_ms([rare]) == 10.0
    assert stalled_share([rare]) == 0.5


def test_the_table_has_a_row_for_each_interval_and_way() -> None:
    rows = table({1.0: {OTHER: [STALLED, STALLED], OURS: [CALM]}, 0.0: {OURS: [CALM]}}).splitlines()
    assert rows[2].startswith(
        f"| 1 s | {OTHER} | 20.0 | 800.0 | 800 | 82% | 10.0 | 1.00 | 20 of 20 | 80"
    )
    assert rows[3].startswith(
        f"| 1 s | {OURS} | 20.0 | 30.0 | 30 | 0% | 10.0 | 0.90 | 9 of 10 | 900 |"
    )
    assert rows[4].startswith(f"| never | {OURS}")


def test_the_target_is_met_or_missed() -> None:
    assert targets({1.0: {OTHER: [STALLED], OURS: [CALM]}})[0].endswith(
        "0.04, wanted 0.5 at most: met"
    )
    assert targets({1.0: {OTHER: [CALM], OURS: [STALLED]}})[0].endswith(": MISSED")
    assert targets({0.0: {OTHER: [CALM], OURS: [STALLED]}}) == []


def test_the_picture_has_a_panel_for_each_interval_and_a_line_for_each_way() -> None:
    ways = {OTHER: [STALLED], OURS: [CALM]}
    root = ET.fromstring(draw({1.0: ways, 2.0: ways, 0.0: ways}, "Gaps"))
    names = [element.tag.rpartition("}")[2] for element in root.iter()]
    assert names.count("g") == 2
    assert names.count("polyline") == 4
    lines = [
        element.get("points", "") for element in root.iter() if element.tag.endswith("polyline")
    ]
    for line in lines:
        points = [tuple(map(float, point.split(","))) for point in line.split()]
        assert len(points) > 10
        assert all(0 <= x <= 490 and 0 <= y <= 400 for x, y in points)
