"""Reads requests from files: our own lines of JSON, ShareGPT conversations, and Mooncake's traces."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Final

from headrace_cli.load.workload import TOKENS_MAX, PlannedRequest, random_tokens
from headrace_common.errors import ConfigError

FILE_BYTES_MAX: Final = 2 << 30
# Each hash of a trace stands for a block of so many tokens: equal hashes are equal tokens.
TRACE_BLOCK_TOKENS: Final = 512

_ROLES: Final = {"human": "user", "user": "user", "gpt": "assistant", "system": "system"}


def read_dataset(
    path: Path, count: int, *, output_tokens: int, trace_speed: float = 1.0
) -> list[PlannedRequest]:
    """The first `count` requests of a file. Its first entry decides its form, and all others must have it.

    - `{"prompt": TEXT}`, `{"messages": [...]}` or `{"prompt_token_ids": [...]}`, each with `output_tokens` if it is to
      have exactly so many; otherwise up to the argument `output_tokens`
    - `{"conversations": [{"from": "human", "value": TEXT}, ...]}`: the first question; a list of them is one JSON file
    - `{"timestamp": MS, "input_length": N, "output_length": N, "hash_ids": [...]}`: sent at its time divided by
      `trace_speed`. The form is that of the traces of Mooncake (Qin et al., FAST 2025).

    Raises ConfigError naming the line.
    """
    requests: list[PlannedRequest] = []
    read: Callable[[Mapping[str, Any]], PlannedRequest | None] | None = None
    for number, entry in enumerate(_entries(path), start=1):
        if len(requests) == count:
            break
        try:
            if not isinstance(entry, dict):
                raise TypeError("it is no object")
            read = read or _reader(entry, output_tokens, trace_speed)
            request = read(entry)
        except (KeyError, TypeError, ValueError) as error:
            cause = f"field {error} is missing" if isinstance(error, KeyError) else str(error)
            raise _wrong(f"entry {number} of {path}: {cause}") from error
        if request is not None:
            requests.append(request)
    if not requests:
        raise _wrong(f"{path} has no request: use lines such as " + '{"prompt": "Hello"}')
    return requests


def _entries(path: Path) -> Any:
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise _wrong(f"{path} has more than {FILE_BYTES_MAX >> 30} GiB: cut it")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _wrong(f"cannot read {path}: {error}") from error
    try:
        if text.lstrip().startswith("["):
            return json.loads(text)
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    except json.JSONDecodeError as error:
        raise _wrong(f"{path} is neither a JSON list nor lines of JSON: {error}") from error


def _reader(
    entry: Mapping[str, Any], output_tokens: int, trace_speed: float
) -> Callable[[Mapping[str, Any]], PlannedRequest | None]:
    if "conversations" in entry:
        return lambda one: _conversation(one, output_tokens)
    if "hash_ids" in entry:
        return lambda one: _traced(one, trace_speed)
    return lambda one: _own(one, output_tokens)


def _own(entry: Mapping[str, Any], output_tokens: int) -> PlannedRequest:
    exact = "output_tokens" in entry
    tokens = _count(entry, "output_tokens") if exact else output_tokens
    if "messages" in entry:
        messages = tuple((_text(one, "role"), _text(one, "content")) for one in entry["messages"])
        return PlannedRequest(messages=messages, output_tokens=tokens, exact=exact)
    if "prompt_token_ids" in entry:
        ids = tuple(int(one) for one in entry["prompt_token_ids"])
        return PlannedRequest(token_ids=ids, output_tokens=tokens, exact=exact)
    return PlannedRequest(text=_text(entry, "prompt"), output_tokens=tokens, exact=exact)


def _conversation(entry: Mapping[str, Any], output_tokens: int) -> PlannedRequest | None:
    """The conversation up to its first question. None where it has no question."""
    messages: list[tuple[str, str]] = []
    for turn in islice(entry["conversations"], 2):
        messages.append((_ROLES.get(_text(turn, "from"), "user"), _text(turn, "value")))
        if messages[-1][0] == "user":
            return PlannedRequest(
                messages=tuple(messages), output_tokens=output_tokens, exact=False
            )
    return None


def _traced(entry: Mapping[str, Any], speed: float) -> PlannedRequest:
    length = _count(entry, "input_length")
    tokens: list[int] = []
    for block in entry["hash_ids"]:
        tokens += random_tokens(TRACE_BLOCK_TOKENS, f"trace/{int(block)}")
    tokens += random_tokens(max(0, length - len(tokens)), f"trace tail/{length}/{len(tokens)}")
    return PlannedRequest(
        token_ids=tuple(tokens[:length]),
        output_tokens=_count(entry, "output_length"),
        start_s=float(entry["timestamp"]) / 1e3 / speed,
    )


def _text(entry: Mapping[str, Any], name: str) -> str:
    value = entry[name]
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} must be a text")
    return value


def _count(entry: Mapping[str, Any], name: str) -> int:
    value = entry[name]
    if not isinstance(value, int) or not 1 <= value <= TOKENS_MAX:
        raise ValueError(f"{name} must be a number from 1 to {TOKENS_MAX}")
    return value


def _wrong(detail: str) -> ConfigError:
    return ConfigError(detail, metadata={"field": "dataset"})
