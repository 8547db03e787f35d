"""The documents: length, terms, links and navigation."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from build_docs import FOLDERS, TOP_PAGES
from tests.unit.test_architecture import ROOT

GLOSSARY = ROOT / "docs" / "glossary.md"
PAGES = (
    *(ROOT / name for name in TOP_PAGES),
    *(path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.md"))),
)
TERM_PAGES = (ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").rglob("*.md")))
PACKAGES = sorted(path.parent.name for path in (ROOT / "protos" / "headrace").glob("*/v1"))
GENERATED = {"docs/settings.md", *(f"docs/api/headrace.{name}.v1.md" for name in PACKAGES)}

FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
CODE_SPAN = re.compile(r"`[^`\n]*`")
ITALICS = re.compile(r"(?<![*\w])\*(?![*\s])([^*]+?)(?<!\s)\*(?!\*)")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} +(.+?)\s*$", re.MULTILINE)


def prose_of(text: str) -> str:
    return CODE_SPAN.sub("code", FENCE.sub("", text))


def terms() -> list[str]:
    return re.findall(r"^### (.+)$", GLOSSARY.read_text(encoding="utf-8"), re.MULTILINE)


def unknown_terms(text: str, known: set[str]) -> list[str]:
    """The texts in italics that are no term, also not in the plural."""
    found = (" ".join(match.split()) for match in ITALICS.findall(prose_of(text)))
    return [
        term
        for term in found
        if not {term.lower(), term.lower().removesuffix("s")} & {name.lower() for name in known}
    ]


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
        if not path.is_file() or (anchor and anchor not in anchors_of(path.read_text())):
            yield target


@pytest.mark.parametrize(("name", "limit"), [("README.md", 600), ("ARCHITECTURE.md", 1_500)])
def test_first_pages_are_short(name: str, limit: int) -> None:
    assert len((ROOT / name).read_text(encoding="utf-8").split()) <= limit


@pytest.mark.parametrize("page", TERM_PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_terms_in_italics_are_in_the_glossary(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert not unknown_terms(text, set(terms())), (
        f"define them in {GLOSSARY.name}, or use no italics"
    )


def test_an_unknown_term_is_found() -> None:
    text = "A *write lease*, *ledgers* and a\n*flux\ncapacitor*; **bold**, `*code*`, 2 * 3 * 4"
    assert unknown_terms(text, {"write lease", "ledger"}) == ["flux capacitor"]


def test_the_glossary_is_in_order_and_every_term_has_a_definition() -> None:
    names = terms()
    assert names == sorted(names, key=str.lower)
    assert len(names) == len(set(names))
    text = GLOSSARY.read_text(encoding="utf-8")
    for name in names:
        definition = text.partition(f"### {name}\n")[2].partition("\n### ")[0].strip()
        assert 1 <= len(re.findall(r"[.!?](?:\s|$)", definition)) <= 3, name


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_resolve_in_the_repository(page: Path) -> None:
    assert not list(broken_links(page))


def test_a_broken_link_and_a_broken_anchor_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One `two`\n[a](#one-two) [b](#three) [c](other.md) [d](https://x.org)\n")
    assert list(broken_links(page)) == ["#three", "other.md"]


def listed_pages(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    else:
        for value in entry.values() if isinstance(entry, dict) else entry:
            yield from listed_pages(value)


def test_the_navigation_lists_every_page_once() -> None:
    site = tomllib.loads((ROOT / "docs" / "zensical.toml").read_text(encoding="utf-8"))
    listed = list(listed_pages(site["project"]["nav"]))
    pages = {str(page.relative_to(ROOT)) for page in PAGES} | GENERATED
    assert sorted(listed) == sorted(pages)


SECURITY = ROOT / "docs" / "security.md"
TEST = re.compile(r"`tests/[\w/]+\.py:test_\w+`")


def untested_rows(text: str) -> Iterator[str]:
    """The rows of tables that name no test. In a table without a column for tests, its section names one."""
    for section in re.split(r"^## ", text, flags=re.MULTILINE):
        for table in re.findall(r"(?:^\|.*\n?)+", section, re.MULTILINE):
            head, _, *rows = table.splitlines()
            column = head.rstrip(" |").rpartition("| ")[2]
            if column.partition(" in ")[0] == "test":
                yield from (row for row in rows if not is_tested(row, column))
            elif not TEST.search(section):
                yield from rows


def is_tested(row: str, column: str) -> bool:
    """Whether the row names a test, "the same" as the row before, or "-" for none. `column` may name the file."""
    if re.search(rf"{TEST.pattern}|\| (?:-|the same) \|$", row):
        return True
    file = re.search(r"`(tests/[\w/]+\.py)`", column)
    name = re.search(r"`(test_\w+)` \|$", row)
    if file is None or name is None:
        return False
    return f"def {name[1]}(" in (ROOT / file[1]).read_text(encoding="utf-8")


def test_every_row_of_the_security_page_names_a_test() -> None:
    assert not list(untested_rows(SECURITY.read_text(encoding="utf-8")))


def test_a_row_without_a_test_is_found() -> None:
    cited = "`tests/a/test_b.py:test_c`"
    text = (
        f"## One\n\n| a | test |\n|---|---|\n| 1 | {cited} |\n| 2 | |\n| 3 | - |\n| 4 | the same |\n\n"
        "| a | test in `tests/unit/test_documents.py` |\n|---|---|\n| 8 | `test_none` |\n"
        "| 9 | `test_an_unknown_term_is_found` |\n\n"
        f"## Two\n\n| a | b |\n|---|---|\n| 5 | 6 |\n\n## Three\n\n| a |\n|---|\n| 7 |\n\n{cited}\n"
    )
    assert list(untested_rows(text)) == ["| 2 | |", "| 8 | `test_none` |", "| 5 | 6 |"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_command_runs_a_package_that_is_not_installed(page: Path) -> None:
    """Before `make setup`, npx would fetch an unrelated package of the same name."""
    assert not re.search(r"\bnpx\b", page.read_text(encoding="utf-8"))
