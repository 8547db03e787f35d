"""Errors that crossed a process border as (reason, detail)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from headrace_common.errors import HeadraceError, InternalError, InvalidRequest


def _kinds(kind: type[HeadraceError]) -> Iterator[type[HeadraceError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _kinds(child)


# InvalidRequest is made from violations, not from a detail.
_BY_REASON = {
    kind.reason: kind
    for kind in _kinds(HeadraceError)
    if kind not in (HeadraceError, InvalidRequest)
}


def error_of(reason: str, detail: str, metadata: Mapping[str, str] | None = None) -> HeadraceError:
    """The error that `reason` names; an unknown one is a bug."""
    kind = _BY_REASON.get(reason, InternalError)
    return kind(detail if kind.reason == reason else f"{reason}: {detail}", metadata=metadata)
