"""ARCHITECTURE.md names functions; they exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "ARCHITECTURE.md"
REFERENCE = re.compile(r"`((?:libs|services|scripts|tests)/[\w/.-]+\.py):([\w.]+)`")


def references() -> list[tuple[str, str]]:
    return sorted(set(REFERENCE.findall(DOCUMENT.read_text(encoding="utf-8"))))


def defined_names(tree: ast.Module) -> set[str]:
    """Top-level functions, classes and constants, and "Class.member" for what classes define."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.Assign):
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
        if isinstance(node, ast.ClassDef):
            names.update(
                f"{node.name}.{member.name}"
                for member in node.body
                if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef)
            )
    return names


def test_the_document_follows_a_request_through_every_part() -> None:
    files = {file for file, _ in references()}
    for part in (
        "headrace_router",
        "headrace_decode",
        "headrace_prefill",
        "headrace_kv",
        "headrace_engine",
    ):
        assert any(part in file for file in files), f"ARCHITECTURE.md names no function of {part}"


@pytest.mark.parametrize(("file", "name"), references())
def test_the_name_exists(file: str, name: str) -> None:
    path = ROOT / file
    assert path.is_file(), f"ARCHITECTURE.md names {file}, which is not there"
    assert name in defined_names(ast.parse(path.read_text(encoding="utf-8")))


def test_a_wrong_name_would_be_noticed() -> None:
    names = defined_names(ast.parse("class A:\n    def b(self): ...\n\ndef c(): ...\n"))
    assert names == {"A", "A.b", "c"}


def test_every_path_in_the_tree_section_exists() -> None:
    """The tree of folders in ARCHITECTURE.md is the tree on disk."""
    for path in re.findall(
        r"^\| `([\w/.-]+/)` \|", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE
    ):
        assert (ROOT / path).is_dir(), f"ARCHITECTURE.md names {path}, which is not there"
