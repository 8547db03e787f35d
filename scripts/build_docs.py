"""Build the documentation site into build/docs/site.

    python scripts/build_docs.py

Pages are staged under build/docs/source with the paths that they have in the repository, so a link that resolves in
one resolves in the other. The settings and API pages are generated there and not committed. The build fails on a
broken link or anchor, and on a page that would load something from another host. Beside the pages stand their Markdown
and llms.txt, the list of them for language models (https://llmstxt.org).
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
BUILD: Final = ROOT / "build" / "docs"
SOURCE: Final = BUILD / "source"
SITE: Final = BUILD / "site"
CONFIG: Final = BUILD / "zensical.toml"
TOP_PAGES: Final = (
    "README.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
)
FOLDERS: Final = ("docs", "bench/results")
STAGED_SUFFIXES: Final = (".md", ".svg", ".png")
BUILD_TIMEOUT_S: Final = 120

_REMOTE: Final = re.compile(
    r"<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)=[\"']?(?:https?:)?//[^\"'\s>]*"
    r"|(?:@import|url\()\s*[\"']?(?:https?:)?//[^\"')\s]*"
    r"|class=[\"']?mermaid"
)


def stage() -> None:
    """Copies the pages and their pictures, and generates the others."""
    shutil.rmtree(SOURCE, ignore_errors=True)
    SOURCE.mkdir(parents=True)
    shutil.copyfile(ROOT / "docs" / "zensical.toml", CONFIG)
    files = [ROOT / name for name in TOP_PAGES]
    for folder in FOLDERS:
        files += (path for path in (ROOT / folder).rglob("*") if path.suffix in STAGED_SUFFIXES)
    for path in files:
        target = SOURCE / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    generate("settings_reference.py", SOURCE / "docs" / "settings.md")
    generate("error_reference.py", SOURCE / "docs" / "errors.md")
    generate("api_reference.py", SOURCE / "docs" / "api")


def generate(script: str, output: Path) -> None:
    """Runs a script that writes one page or a folder of pages. Raises CalledProcessError when it fails."""
    command = [sys.executable, str(ROOT / "scripts" / script), str(output)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=BUILD_TIMEOUT_S)


def build() -> None:
    """Runs Zensical, which fails on a broken link or anchor."""
    shutil.rmtree(SITE, ignore_errors=True)
    zensical = str(Path(sys.executable).with_name("zensical"))
    # Zensical keeps its cache in .cache beside its configuration file, and --clean deletes that folder. The
    # repository's own .cache holds wheels and images, so the configuration file must not be in the repository's root.
    command = [zensical, "build", "--strict", "--clean", "--config-file", str(CONFIG)]
    subprocess.run(command, cwd=BUILD, check=True, timeout=BUILD_TIMEOUT_S)


def remote_loads(site: Path) -> Iterator[str]:
    """Yields each place at which a page or a style sheet loads something from another host."""
    for path in sorted((*site.rglob("*.html"), *site.rglob("*.css"))):
        for match in _REMOTE.finditer(path.read_text(encoding="utf-8")):
            yield f"{path.relative_to(site)}: {match.group()}"


def write_for_models(source: Path, site: Path) -> None:
    """Copies each page's Markdown beside it, and lists the pages of the navigation in llms.txt."""
    for path in source.rglob("*.md"):
        shutil.copyfile(path, site / path.relative_to(source))
    project = tomllib.loads(CONFIG.read_text(encoding="utf-8"))["project"]
    lines = [f"# {project['site_name']}", "", f"> {project['site_description']}", ""]
    for section in project["nav"]:
        ((title, pages),) = section.items()
        lines += [f"## {title}", ""]
        listed = [{title: pages}] if isinstance(pages, str) else pages
        lines += [f"- [{name}]({path})" for page in listed for name, path in page.items()]
        lines.append("")
    (site / "llms.txt").write_text("\n".join(lines), encoding="utf-8")


def main() -> int:
    stage()
    try:
        build()
    except subprocess.CalledProcessError:
        print("docs: the site has broken links, see above", file=sys.stderr)
        return 1
    write_for_models(SOURCE, SITE)
    found = list(remote_loads(SITE))
    for place in found:
        print(f"docs: loads from another host: {place}", file=sys.stderr)
    if found:
        return 1
    pages = sum(1 for _ in SITE.rglob("*.html"))
    site = SITE.relative_to(ROOT)
    print(f"{pages} pages in {site}; read them with: python3 -m http.server --directory {site}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
