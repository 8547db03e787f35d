"""A benchmark replaces only its parts of a page."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.support.page_parts import check_page, write_parts


def test_a_part_is_replaced_and_the_rest_of_the_page_stays(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# Title\n\n<!-- begin one -->\nold\n<!-- end one -->\n\nBy hand.\n\n"
        "<!-- begin two -->\nkept\n<!-- end two -->\n"
    )
    write_parts(page, {"one": "| new |\n"})
    text = page.read_text()
    assert text == (
        "# Title\n\n<!-- begin one -->\n\n| new |\n\n<!-- end one -->\n\nBy hand.\n\n"
        "<!-- begin two -->\nkept\n<!-- end two -->\n"
    )
    write_parts(page, {"one": "| new |"})
    assert page.read_text() == text, "writing a part twice changes nothing"


def test_a_new_page_is_made_with_its_folder(tmp_path: Path) -> None:
    page = tmp_path / "results" / "page.md"
    write_parts(page, {"one": "a", "two": "b"}, "# Title\n")
    assert page.read_text().startswith("# Title\n\n<!-- begin one -->\n\na\n\n<!-- end one -->\n")
    write_parts(page, {"two": "c"})
    assert "\n\nc\n\n" in page.read_text()


@pytest.mark.parametrize(
    "text",
    [
        "by hand",
        "<!-- begin one -->",
        "<!-- end one --> <!-- begin one -->",
        "<!-- begin one --> <!-- end one --> <!-- begin one -->",
    ],
)
def test_a_page_without_the_part_is_left_alone(tmp_path: Path, text: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(SystemExit, match="<!-- begin one -->"):
        check_page(page, ["one"])
    with pytest.raises(SystemExit):
        write_parts(page, {"one": "a"})
    assert page.read_text() == text
