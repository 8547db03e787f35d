"""Answers for programs: one JSON document, which docs/commands.md describes field by field."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Annotated

import typer

from headrace_cli.records import Record

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document for programs.")]


def record_text(record: Record, *, one_line: bool = False) -> str:
    """The document, with the name of its schema first."""
    document = {"schema": record.schema, **asdict(record)}
    return json.dumps(document, indent=None if one_line else 2, ensure_ascii=False)


def print_record(record: Record, *, one_line: bool = False) -> None:
    """Writes the document to stdout."""
    sys.stdout.write(f"{record_text(record, one_line=one_line)}\n")
    sys.stdout.flush()
