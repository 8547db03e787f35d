"""The documents: links and navigation."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from build_docs import FOLDERS, TOP_PAGES
from tests.unit.test_architecture import ROOT

PAGES = (
    *(ROOT / name for name in TOP_PAGES),
    *(path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.md"))),
)
PACKAGES = sorted(path.parent.name for path in (ROOT / "protos" / "headrace").glob("*/v1"))
GENERATED = {
    "docs/settings.md",
    "docs/errors.md",
    *(f"docs/api/headrace.{name}.v1.md" for name in PACKAGES),
}

FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} +(.+?)\s*$", re.MULTILINE)


def anchors_of(text: str) -> set[str]:
    """The anchors of headings, as GitHub and the site make them."""
    plain = (heading.replace("`", "").lower() for heading in HEADING.findall(FENCE.sub("", text)))
    return {re.sub(r"[\s]", "-", re.sub(r"[^\w\s-]", "", heading)) for heading in plain}


def broken_links(page: Path) -> Iterator[str]:
    for target in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        known = path in PAGES if path.suffix == ".md" else path.is_file()
        if not known or (anchor and anchor not in anchors_of(path.read_text())):
            yield target


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_resolve_in_the_repository(page: Path) -> None:
    assert not list(broken_links(page))


def listed_pages(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    else:
        for value in entry.values() if isinstance(entry, dict) else entry:
            yield from listed_pages(value)


def test_the_navigation_lists_every_page_once() -> None:
    site = tomllib.loads((ROOT / "docs" / "zensical.toml").read_text(encoding="utf-8"))
    pages = {str(page.relative_to(ROOT)) for page in PAGES} | GENERATED
    assert sorted(listed_pages(site["project"]["nav"])) == sorted(pages)
