"""Reads traces of the form that Mooncake published (Qin et al., FAST 2025). docs/simulator.md describes it."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from headrace_common.callers.priority import Priority
from headrace_common.errors import ConfigError

BLOCK_TOKENS: Final = 512
"""Each hash id stands for a block of so many prompt tokens. Equal ids are equal tokens."""
REQUESTS_MAX: Final = 2_000_000
TOKENS_MAX: Final = 1_000_000
LINE_CHARACTERS_MAX: Final = 1 << 20
_TIMESTAMP_MS_MAX: Final = 31 * 86_400_000
_HASH_ID_MAX: Final = 1 << 62
_WORDS_PER_ID: Final = 2
_UNIQUE: Final = 1 << 63
_CLASSES: Final = {priority.label: priority for priority in Priority}


_Parsed: TypeAlias = tuple[float, int, int, tuple[int, ...], Priority]
"""The fields of a TraceRequest after its number."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. `number` counts from 0 in the order of arrival, `arrival_s` from the start of the trace."""

    number: int
    arrival_s: float
    prompt_tokens: int
    answer_tokens: int
    hash_ids: tuple[int, ...] = ()
    priority: Priority = Priority.NORMAL

    def line(self) -> str:
        """The request as a line of a trace, with its class where that is not normal."""
        entry: dict[str, Any] = {
            "timestamp": round(1e3 * self.arrival_s, 3),
            "input_length": self.prompt_tokens,
            "output_length": self.answer_tokens,
            "hash_ids": self.hash_ids,
        }
        if self.priority is not Priority.NORMAL:
            entry["priority"] = self.priority.label
        return json.dumps(entry, separators=(",", ":")) + "\n"

    def token_words(self) -> bytes:
        """Stand-ins for the token ids of all whole blocks, as little-endian u32. Blocks with equal ids are equal.

        Blocks without an id are unlike those of any other request.
        """
        block_count = self.prompt_tokens // BLOCK_TOKENS
        ids = [
            *self.hash_ids[:block_count],
            *(
                _UNIQUE | self.number << 24 | place
                for place in range(len(self.hash_ids), block_count)
            ),
        ]
        return b"".join(struct.pack("<Q", one) * (BLOCK_TOKENS // _WORDS_PER_ID) for one in ids)


def read_trace(lines: Iterable[str], *, seconds_max: float = float("inf")) -> list[TraceRequest]:
    """The requests of the first `seconds_max` seconds, in the order of arrival. Empty lines are skipped.

    Raises ConfigError, which names the line and the field.
    """
    found: list[_Parsed] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if len(found) >= REQUESTS_MAX or len(line) > LINE_CHARACTERS_MAX:
            raise _wrong(
                number,
                f"a trace has at most {REQUESTS_MAX} lines of {LINE_CHARACTERS_MAX} characters",
            )
        request = _parse(number, line)
        if request[0] < seconds_max:
            found.append(request)
    if not found:
        raise ConfigError(
            "the trace has no request: give lines with timestamp, input_length, output_length and hash_ids",
            metadata={"field": "trace"},
        )
    found.sort(key=lambda one: one[0])
    return [TraceRequest(number, *one) for number, one in enumerate(found)]


def _parse(number: int, line: str) -> _Parsed:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise _wrong(number, f"no JSON: {error}") from None
    if not isinstance(entry, dict):
        raise _wrong(number, "no JSON object")
    timestamp = entry.get("timestamp")
    if not isinstance(timestamp, int | float) or not 0 <= timestamp <= _TIMESTAMP_MS_MAX:
        raise _wrong(number, f"timestamp must be milliseconds from 0 to {_TIMESTAMP_MS_MAX}")
    prompt_tokens = _count(number, entry, "input_length")
    hash_ids = entry.get("hash_ids", [])
    if not isinstance(hash_ids, list) or not all(
        isinstance(one, int) and 0 <= one < _HASH_ID_MAX for one in hash_ids
    ):
        raise _wrong(number, "hash_ids must be a list of integers from 0")
    if len(hash_ids) > -(-prompt_tokens // BLOCK_TOKENS):
        raise _wrong(
            number,
            f"{len(hash_ids)} hash_ids are more than the blocks of {BLOCK_TOKENS} tokens that input_length has",
        )
    return (
        timestamp / 1e3,
        prompt_tokens,
        _count(number, entry, "output_length"),
        tuple(hash_ids),
        _priority(number, entry),
    )


def _count(number: int, entry: Mapping[str, Any], name: str) -> int:
    value = entry.get(name)
    if not isinstance(value, int) or not 1 <= value <= TOKENS_MAX:
        raise _wrong(number, f"{name} must be an integer from 1 to {TOKENS_MAX}")
    return value


def _priority(number: int, entry: Mapping[str, Any]) -> Priority:
    label = entry.get("priority", Priority.NORMAL.label)
    if not isinstance(label, str) or label not in _CLASSES:
        raise _wrong(number, f"priority must be one of {', '.join(_CLASSES)}")
    return _CLASSES[label]


def _wrong(number: int, detail: str) -> ConfigError:
    return ConfigError(f"line {number} of the trace: {detail}", metadata={"field": "trace"})
