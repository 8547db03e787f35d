"""The picture of what separate workers gain and cost."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest

from gains_chart import PICTURE, RESULTS, draw, read_ways


def test_the_picture_has_the_figures_of_the_results() -> None:
    ways = read_ways(RESULTS.read_text(encoding="utf-8"))
    picture = PICTURE.read_text(encoding="utf-8")
    assert picture == draw(ways), "run scripts/gains_chart.py"
    texts = [element.text for element in ET.fromstring(picture).iter()]
    assert len(ways) == 4
    for way in ways:
        assert texts.count(way.name) == 2
        for value in way.figures.values():
            assert f"{value:,.0f}" in texts
    assert "prefers-color-scheme: dark" in picture


def test_results_without_the_rate_are_refused() -> None:
    with pytest.raises(ValueError, match="no times at 3 requests"):
        read_ways("| requests/s | way |\n|---|---|\n| 2 | x |\n")
