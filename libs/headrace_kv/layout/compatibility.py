"""Decides whether two layouts can exchange KV (I8). Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from headrace_common.errors import LayoutMismatch
from headrace_kv.layout.layout import KvLayout


def fingerprint(layout: KvLayout) -> KvLayout:
    """The layout without the fields that may differ between prefill and decode.

    These are parallelism, local broadcast, and the block size where tokens are addressable and none leave a window. Two
    workers are compatible when their fingerprints are equal.
    """
    groups = (
        replace(group, block_tokens=0)
        if group.token_addressable and not group.is_windowed
        else group
        for group in layout.groups
    )
    ordered = tuple(
        replace(group, parts=tuple(sorted(group.parts, key=lambda part: part.name)))
        for group in groups
    )
    return KvLayout(layout.model, 0, ordered)


def layout_differences(ours: KvLayout, theirs: KvLayout) -> dict[str, str]:
    """The fields in which two fingerprints differ: paths such as "attention.k.dtype", each with both values."""
    left, right = _flat(fingerprint(ours)), _flat(fingerprint(theirs))
    return {
        path: f"{left.get(path, 'none')} != {right.get(path, 'none')}"
        for path in sorted(left.keys() | right.keys())
        if left.get(path) != right.get(path)
    }


def require_compatible(ours: KvLayout, theirs: KvLayout) -> None:
    """Raises LayoutMismatch naming the differing fields (I8)."""
    differences = layout_differences(ours, theirs)
    if differences:
        named = ", ".join(f"{name} ({values})" for name, values in differences.items())
        raise LayoutMismatch(
            f"KV layouts differ in {named}: start both workers with the same model and cache settings",
            metadata=differences,
        )


def count_spans(numbers: Iterable[int]) -> str:
    """ "3, 17-29" for {3, 17, 18, ..., 29}."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and spans[-1][1] + 1 == number:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)


def _flat(layout: KvLayout) -> dict[str, str]:
    found = {"model": layout.model, "groups": ", ".join(group.name for group in layout.groups)}
    for group in layout.groups:
        at = group.name
        found[f"{at}.layers"] = count_spans(group.layers)
        found[f"{at}.kind"] = group.kind
        found[f"{at}.head_count"] = str(group.head_count)
        found[f"{at}.block_tokens"] = str(group.block_tokens)
        found[f"{at}.window_tokens"] = str(group.window_tokens)
        found[f"{at}.chunk_tokens"] = str(group.chunk_tokens)
        found[f"{at}.parts"] = ", ".join(part.name for part in group.parts)
        for part in group.parts:
            found[f"{at}.{part.name}.dtype"] = part.dtype
            found[f"{at}.{part.name}.unit_bytes"] = str(part.unit_bytes)
            found[f"{at}.{part.name}.block_format"] = part.block_format
    return found
