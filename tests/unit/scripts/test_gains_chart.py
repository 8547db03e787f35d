"""The picture of goodput by bounds and way."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest

from gains_chart import PICTURE, RESULTS, draw, read_panels


def test_the_picture_has_the_figures_of_the_results() -> None:
    panels = read_panels(RESULTS.read_text(encoding="utf-8"))
    picture = PICTURE.read_text(encoding="utf-8")
    assert picture == draw(panels), "run scripts/gains_chart.py"
    texts = [element.text or "" for element in ET.fromstring(picture).iter()]
    assert len(panels) == 4
    for panel in panels:
        for way, value in panel.goodput.items():
            assert texts.count(way) == len(panels)
            assert f"{value:g}" in texts
    assert "prefers-color-scheme: dark" in picture


def test_results_without_goodput_are_refused() -> None:
    with pytest.raises(ValueError, match="no table of goodput"):
        read_panels("| requests/s | way |\n|---|---|\n| 2 | x |\n")
