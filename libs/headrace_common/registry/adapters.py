"""LoRA adapters, as workers announce them and requests name them. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from headrace.inference.v1 import adapter_pb2

ADAPTERS_MAX: Final = 64
"""Most adapters of one worker."""
ADAPTER_NAME_CHARACTERS_MAX: Final = 63
ADAPTER_DIGEST_CHARACTERS_MAX: Final = 64
ADAPTER_PATH_BYTES_MAX: Final = 4096
"""Most bytes of the path of an adapter that is loaded at run time."""
_NAME: Final = re.compile(f"[!-~]{{1,{ADAPTER_NAME_CHARACTERS_MAX}}}")
_NO_PARTS: Final = frozenset({"", ".", ".."})
ADAPTER_NAME_REMEDY: Final = (
    f"give 1 to {ADAPTER_NAME_CHARACTERS_MAX} visible ASCII characters, "
    "and no part '', '.' or '..' between slashes"
)
_DIGEST: Final = re.compile(f"[0-9a-f]{{1,{ADAPTER_DIGEST_CHARACTERS_MAX}}}")


@dataclass(frozen=True, slots=True, order=True)
class Adapter:
    """The identity of an adapter. `digest` is that of its weights and configuration."""

    name: str
    digest: str

    def __str__(self) -> str:
        return self.name


def is_adapter_name(text: str) -> bool:
    """Whether an adapter may have this name: see ADAPTER_NAME_REMEDY."""
    return _NAME.fullmatch(text) is not None and _NO_PARTS.isdisjoint(text.split("/"))


def adapter_to_proto(adapter: Adapter) -> adapter_pb2.Adapter:
    """Converts an adapter."""
    return adapter_pb2.Adapter(name=adapter.name, digest=adapter.digest)


def adapter_from_proto(message: adapter_pb2.Adapter) -> Adapter:
    """Converts an adapter."""
    return Adapter(message.name, message.digest)


def adapters_from_proto(messages: Iterable[adapter_pb2.Adapter]) -> frozenset[Adapter]:
    """Converts the adapters that a worker announces."""
    return frozenset(map(adapter_from_proto, messages))


def adapter_violations(message: adapter_pb2.Adapter, path: str) -> dict[str, str]:
    """The remedy for each wrong field of a present message."""
    violations: dict[str, str] = {}
    if not is_adapter_name(message.name):
        violations[f"{path}.name"] = ADAPTER_NAME_REMEDY
    if _DIGEST.fullmatch(message.digest) is None:
        violations[f"{path}.digest"] = (
            f"give 1 to {ADAPTER_DIGEST_CHARACTERS_MAX} characters of 0-9 and a-f"
        )
    return violations


def announced_violations(messages: Sequence[adapter_pb2.Adapter], path: str) -> dict[str, str]:
    """The remedy for each wrong field of the adapters that a worker announces."""
    if len(messages) > ADAPTERS_MAX:
        return {path: f"give at most {ADAPTERS_MAX}, not {len(messages)}"}
    violations: dict[str, str] = {}
    names: set[str] = set()
    for index, message in enumerate(messages):
        violations.update(adapter_violations(message, f"{path}[{index}]"))
        if message.name in names:
            violations[f"{path}[{index}].name"] = "give each name once"
        names.add(message.name)
    return violations


def runtime_violations(
    messages: Sequence[adapter_pb2.RuntimeAdapter],
    announced: Iterable[adapter_pb2.Adapter],
    path: str,
) -> dict[str, str]:
    """The remedy for each wrong field of the adapters of run time. All must be among the `announced`."""
    if len(messages) > ADAPTERS_MAX:
        return {path: f"give at most {ADAPTERS_MAX}, not {len(messages)}"}
    known = adapters_from_proto(announced)
    violations: dict[str, str] = {}
    for index, message in enumerate(messages):
        if adapter_from_proto(message.adapter) not in known:
            violations[f"{path}[{index}].adapter"] = "must be among the member's adapters"
        if not 0 < len(message.path.encode()) <= ADAPTER_PATH_BYTES_MAX:
            violations[f"{path}[{index}].path"] = f"give 1 to {ADAPTER_PATH_BYTES_MAX} bytes"
    return violations
