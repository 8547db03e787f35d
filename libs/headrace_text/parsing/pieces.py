"""The pieces into which a parser divides generated text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins. `call_id` is the id that the model wrote, or empty."""

    name: str
    call_id: str = ""


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments of the latest tool call, which are one JSON object."""

    text: str


Piece: TypeAlias = Content | Reasoning | CallStart | CallArguments
