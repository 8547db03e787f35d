"""docs/commands.md describes every field that --json prints, and no other."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from headrace_cli import records
from headrace_cli.json_output import record_text
from headrace_cli.records import Record, ResetRecord

DOCUMENT = (Path(__file__).resolve().parents[3] / "docs" / "commands.md").read_text()
ALL = [
    one
    for one in vars(records).values()
    if isinstance(one, type) and one.__module__ == records.__name__ and one is not Record
]
DOCUMENTS = [one for one in ALL if issubclass(one, Record)]


def documented(schema: str) -> dict[str, str]:
    """Type by field of the table under the schema's heading."""
    section = DOCUMENT.partition(f"### {schema}\n")[2].partition("\n#")[0]
    return dict(re.findall(r"^\| `([\w.\[\]]+)` \| ([^|]+) \|", section, flags=re.MULTILINE))


def expected(kind: type, prefix: str = "") -> dict[str, str]:
    """Type by path of the fields of a record: `members[].id`."""
    inner = {f"list[{one.__name__}]": one for one in ALL}
    words = {
        "str": "text",
        "int": "integer",
        "float": "number",
        "bool": "boolean",
        "list[str]": "list of texts",
        "Mapping[str, str]": "object",
        "Mapping[str, float]": "object",
        "Mapping[str, int]": "object",
        "Mapping[str, object]": "object",
    }
    found: dict[str, str] = {}
    for one in fields(kind):
        name = str(one.type)
        if name in inner:
            found[f"{prefix}{one.name}"] = "list of objects"
            found |= expected(inner[name], f"{prefix}{one.name}[].")
            continue
        plain = name.removesuffix(" | None")
        found[f"{prefix}{one.name}"] = words[plain] + (" or null" if plain != name else "")
    return found


@pytest.mark.parametrize("kind", DOCUMENTS, ids=lambda kind: kind.schema)
def test_every_field_of_a_schema_is_documented_with_its_type(kind: type[Record]) -> None:
    assert documented(kind.schema) == expected(kind)


def test_schemas_have_names_of_their_own_with_a_version() -> None:
    names = [kind.schema for kind in DOCUMENTS]
    assert len(set(names)) == len(names) >= 10
    assert all(re.fullmatch(r"headrace\.[a-z-]+\.v\d+", name) for name in names)
    assert set(re.findall(r"^### (headrace\..*)$", DOCUMENT, flags=re.MULTILINE)) == set(names)


def test_a_document_starts_with_its_schema() -> None:
    assert record_text(ResetRecord(["é"]), one_line=True) == (
        '{"schema": "headrace.reset-cache.v1", "workers": ["é"]}'
    )
