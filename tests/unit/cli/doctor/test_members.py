"""What the doctor finds in the reports of members."""

from __future__ import annotations

import pytest

from headrace_cli.doctor.checks import clock_findings

_SECOND_NS = 10**9


@pytest.mark.parametrize(
    ("sent_s", "text"),
    [(0.0, ""), (97.0, "3.0 s behind"), (99.5, ""), (101.5, ""), (104.0, "3.0 s ahead of")],
)
def test_a_clock_that_is_far_off_is_named(sent_s: float, text: str) -> None:
    found = clock_findings("w", int(sent_s * _SECOND_NS), 100 * _SECOND_NS, 101 * _SECOND_NS)
    assert [text in one.detail for one in found] == ([True] if text else [])
