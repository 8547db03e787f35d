"""The statistics of handover.py."""

from __future__ import annotations

from dataclasses import replace

from bench.handover.report import (
    BY_DECODE,
    BY_PREFILL,
    PEER,
    PLAIN,
    Sample,
    equal_count,
    middle,
    paired_ratio,
    table,
    targets,
)
from bench.support.vllm_ways import alternating

PLAIN_ONE = Sample(1, first_ms=1000, second_ms=1020, cpu_ms=1300, token_ids=(7, 8))
HANDED = replace(
    PLAIN_ONE, first_ms=1010, hand_over_ms=20, transfer_ms=60, exposed_ms=3, late_ms=-70
)


def test_the_median_excludes_unknown_values() -> None:
    assert middle([3.0, None, 1.0, 2.0]) == "2 (1 to 3)"
    assert middle([0.25], 1) == "0.2 (0.2 to 0.2)"
    assert middle([None]) == "-"


def test_ratios_are_of_the_same_prompt() -> None:
    plain = [PLAIN_ONE, replace(PLAIN_ONE, prompt_seed=2, first_ms=2000)]
    ours = [replace(HANDED, prompt_seed=2, first_ms=2200), HANDED, replace(HANDED, prompt_seed=3)]
    # Ratios 1.1 and 1.01. The third sample has no partner.
    assert abs(paired_ratio(ours, plain) - 1.055) < 1e-9
    other = replace(HANDED, prompt_seed=2, token_ids=(7, 9))
    assert equal_count([HANDED, other], plain) == (1, 2)


def test_the_table_has_a_row_for_each_way_and_dashes_for_missing_values() -> None:
    rows = table({BY_PREFILL: [HANDED], PLAIN: [PLAIN_ONE]}).splitlines()
    assert len(rows) == 4
    assert len({row.count("|") for row in rows}) == 1
    assert "| 1.010 |" in rows[2]
    assert "20.0 (20.0 to 20.0)" in rows[2]
    assert "-70.0 (-70.0 to -70.0)" in rows[2]
    assert rows[3].startswith(f"| {PLAIN} | 1,000")
    assert "| - | - | - |" in rows[3]
    assert rows[3].endswith("| 1 of 1 |")


def test_without_plain_nothing_is_compared_with_it() -> None:
    assert table({PEER: [HANDED]}).splitlines()[2].endswith("| - |")
    assert not any("plain" in line for line in targets({BY_PREFILL: [HANDED]}, 30))


def test_targets_are_met_or_missed() -> None:
    peer = replace(HANDED, first_ms=1100, hand_over_ms=80, transfer_ms=None, exposed_ms=60)
    samples = {BY_DECODE: [HANDED], BY_PREFILL: [HANDED], PEER: [peer], PLAIN: [PLAIN_ONE]}
    lines = targets(samples, layer_count=30)
    assert len(lines) == 7
    assert all(line.endswith(": met") for line in lines)

    slow = replace(HANDED, first_ms=1200, hand_over_ms=90, exposed_ms=4.5)
    lines = targets(samples | {BY_PREFILL: [slow]}, layer_count=30)
    assert [line.endswith(": MISSED") for line in lines] == [False] * 3 + [True] * 4
    assert "exposed transfer 4.5 ms, wanted 4.0 at most (1/30" in lines[-1]


def test_orders_alternate_so_that_each_way_is_first() -> None:
    names = ["a", "b", "c"]
    orders = [alternating(names, number) for number in range(6)]
    assert orders[:3] == [["a", "b", "c"], ["c", "b", "a"], ["b", "c", "a"]]
    assert {order[0] for order in orders} == set(names)
    assert all(sorted(order) == names for order in orders)
