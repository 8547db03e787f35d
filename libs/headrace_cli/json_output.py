"""Answers for programs: one JSON document, which docs/commands.md describes."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document for programs.")]


def message_object(message: Message) -> dict[str, Any]:
    """A message by protobuf's JSON mapping, with the names of the proto's fields."""
    return MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )


def json_text(document: Mapping[str, Any], *, one_line: bool = False) -> str:
    """The document as text."""
    return json.dumps(document, indent=None if one_line else 2, ensure_ascii=False)


def print_json(document: Mapping[str, Any], *, one_line: bool = False) -> None:
    """Writes the document to stdout."""
    sys.stdout.write(f"{json_text(document, one_line=one_line)}\n")
    sys.stdout.flush()
