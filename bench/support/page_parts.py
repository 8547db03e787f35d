"""The parts of a page of results that a benchmark writes. All other text of the page is written by hand.

A part stands between two comments:

    <!-- begin NAME -->
    <!-- end NAME -->
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path


def check_page(page: Path, names: Collection[str]) -> None:
    """Raises SystemExit when a page lacks one of these parts. A page that does not exist can be made."""
    if not page.exists():
        return
    text = page.read_text()
    for name in names:
        begin, end = _marks(name)
        if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
            raise SystemExit(
                f"{page} needs the lines '{begin}' and '{end}' once each, in this order, around the part to replace; "
                "add them, or choose another file"
            )


def write_parts(page: Path, parts: Mapping[str, str], notes: str = "") -> None:
    """Replaces these parts of a page. A page that does not exist gets `notes` and the parts. Raises as `check_page`."""
    check_page(page, parts)
    if page.exists():
        text = page.read_text()
    else:
        page.parent.mkdir(parents=True, exist_ok=True)
        text = notes + "".join("\n{}\n{}\n".format(*_marks(name)) for name in parts)
    for name, content in parts.items():
        begin, end = _marks(name)
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = f"{before}{begin}\n\n{content.strip()}\n\n{end}{after}"
    page.write_text(text)


def _marks(name: str) -> tuple[str, str]:
    return f"<!-- begin {name} -->", f"<!-- end {name} -->"
