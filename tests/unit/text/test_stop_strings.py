"""Stop strings in text that arrives in arbitrary pieces."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_text.detokenizer import StopStringScanner

_STOP_STRINGS = st.lists(st.text("ab€", min_size=1, max_size=4), max_size=4)


def _reference_cut(text: str, stop_strings: list[str]) -> str:
    """Letter by letter: the first stop string to be complete cuts the text where it starts."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stop_strings if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))]
    return text


@settings(deadline=None)
@given(st.text("ab€x", max_size=40), _STOP_STRINGS, st.data())
def test_the_pieces_do_not_change_where_text_is_cut(
    text: str, stop_strings: list[str], data: st.DataObject
) -> None:
    scanner = StopStringScanner(stop_strings)
    returned, rest = "", text
    while rest and not scanner.stopped:
        size = data.draw(st.integers(1, len(rest)))
        returned += scanner.scan(rest[:size])
        rest = rest[size:]
    returned += scanner.flush()
    assert returned == _reference_cut(text, stop_strings)


def test_text_that_may_begin_a_stop_string_is_held_back() -> None:
    scanner = StopStringScanner(["END"])
    assert scanner.scan("a E") == "a "
    assert scanner.scan("N") == ""
    assert scanner.scan("x") == "ENx"
    assert scanner.scan("EN") == ""
    assert not scanner.stopped
    assert scanner.flush() == "EN"
