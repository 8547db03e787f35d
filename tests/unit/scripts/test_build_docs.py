"""The check that the site loads nothing from other hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from build_docs import remote_loads


@pytest.mark.parametrize(
    "loads",
    [
        '<script src="https://unpkg.com/mermaid"></script>',
        '<link rel="stylesheet" href="//fonts.example.org/css">',
        "<img src=http://example.org/pixel.png>",
        '<style>@import "https://fonts.example.org/css";</style>',
        "<style>a { background: url(https://example.org/a.png) }</style>",
        '<pre class="mermaid">graph</pre>',
    ],
)
def test_references_to_other_hosts_are_found(tmp_path: Path, loads: str) -> None:
    (tmp_path / "page.html").write_text(f"<html>{loads}</html>")
    assert list(remote_loads(tmp_path))


def test_links_and_local_files_are_allowed(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(
        '<a href="https://example.org">x</a><script src="./bundle.js"></script>'
        '<link rel="icon" href="./icon.png"><img src="picture.svg">'
    )
    assert not list(remote_loads(tmp_path))
