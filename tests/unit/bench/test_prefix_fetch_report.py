"""The page of the prefix fetches: which turns its ratios are of."""

from __future__ import annotations

from bench.prefix_fetch import COMPUTED, FETCHED, NIXL_COMPUTED, NIXL_FETCHED, Turn, render

SIZE = 1 << 20


def turn(ttft_s: float, fetched_bytes: int = 0) -> Turn:
    return Turn(ttft_s, (), fetched_bytes)


def test_ratios_are_of_the_turns_where_both_ways_fetched() -> None:
    found = {
        (COMPUTED, 1): [turn(1.0), turn(1.0)],
        (FETCHED, 1): [turn(1.0), turn(1.0)],
        (NIXL_COMPUTED, 1): [turn(1.0), turn(1.0)],
        (NIXL_FETCHED, 1): [turn(1.0), turn(1.0)],
        (COMPUTED, 2): [turn(2.0), turn(8.0)],
        (FETCHED, 2): [turn(1.0, SIZE), turn(7.0)],
        (NIXL_COMPUTED, 2): [turn(4.0), turn(5.0)],
        (NIXL_FETCHED, 2): [turn(2.5, 2 * SIZE), turn(4.0, 2 * SIZE)],
    }
    page = render({"vLLM": found})
    assert (
        "| vLLM | 2 | 5000.0 | 4000.0 | 4500.0 | 3250.0 | 0.80 | 0.72 | 1.23 |" in page.splitlines()
    )
    assert "- vLLM: fetched: 1 of 4 turns fetched 1.0 MiB." in page
    assert "- vLLM: NixlConnector, fetched: 2 of 4 turns fetched 4.0 MiB." in page
    assert "- vLLM: fetched / computed: median 0.50 of the 1 turns with fetches." in page
    assert (
        "NixlConnector, fetched / NixlConnector, computed: median 0.71 of the 2 turns with fetches."
        in page
    )
    assert "fetched / NixlConnector, fetched: median 0.40 of the 1 turns with fetches." in page


def test_a_run_without_fetches_has_no_ratio() -> None:
    found = {(way, 1): [turn(1.0)] for way in (COMPUTED, FETCHED)}
    page = render({"simulated": found})
    assert "- simulated: fetched / computed: median - of the 0 turns with fetches." in page
    assert "NixlConnector" not in page
