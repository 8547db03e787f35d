"""Which layouts can exchange KV, which workers cannot hand KV over to each other, and why (I8). Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from headrace.registry.v1 import registry_pb2
from headrace_common.errors import LayoutMismatch
from headrace_common.registry.duties import COMPUTE_PROMPTS, GENERATE
from headrace_kv.layout import KvLayout, engine_hash, layout_from_proto

_LAYOUTS_MAX: Final = 64


@lru_cache(maxsize=_LAYOUTS_MAX)
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


TRANSPORT_FIELD: Final = "transport"
_IDS_NAMED: Final = 4


@dataclass(frozen=True, slots=True)
class PairSide:
    """A worker as a member of pairs. `model` is the name that clients use. An empty `transport` is unknown."""

    worker_id: str
    model: str
    layout: KvLayout
    transport: str = ""


@dataclass(frozen=True, slots=True)
class PairFault:
    """None of these prefill workers can hand KV over to any of these decode workers.

    `fields` maps each field that differs to both values, prefill's first. Such a field is "attention.k.dtype",
    "attention.block_tokens" or "transport".
    """

    prefill_ids: tuple[str, ...]
    decode_ids: tuple[str, ...]
    fields: Mapping[str, str]

    def __str__(self) -> str:
        named = ", ".join(f"{field} ({values})" for field, values in self.fields.items())
        return (
            f"{_list_ids(self.prefill_ids)} cannot hand KV over to {_list_ids(self.decode_ids)}, because these differ: "
            f"{named}. Start them with equal settings"
        )


def pair_faults(prefills: Iterable[PairSide], decodes: Iterable[PairSide]) -> list[PairFault]:
    """The pairs of one model that cannot hand KV over. Workers that are alike share an entry."""
    faults: list[PairFault] = []
    receivers = _alike(decodes)
    for senders in _alike(prefills):
        for others in receivers:
            fields = _differences(senders[0], others[0])
            if fields and senders[0].model == others[0].model:
                faults.append(PairFault(_ids(senders), _ids(others), fields))
    return faults


def _alike(sides: Iterable[PairSide]) -> list[list[PairSide]]:
    groups: dict[tuple[str, KvLayout, str], list[PairSide]] = {}
    for side in sorted(sides, key=lambda side: side.worker_id):
        groups.setdefault((side.model, fingerprint(side.layout), side.transport), []).append(side)
    return list(groups.values())


def _differences(prefill: PairSide, decode: PairSide) -> dict[str, str]:
    fields = layout_differences(prefill.layout, decode.layout)
    known = prefill.transport and decode.transport
    if known and prefill.transport != decode.transport:
        fields[TRANSPORT_FIELD] = f"{prefill.transport} != {decode.transport}"
    return fields


def _ids(sides: Iterable[PairSide]) -> tuple[str, ...]:
    return tuple(side.worker_id for side in sides)


def _list_ids(ids: tuple[str, ...]) -> str:
    more = len(ids) - _IDS_NAMED
    return ", ".join(ids[:_IDS_NAMED]) + (f" and {more} more" if more > 0 else "")


def layout_hash(layout: KvLayout) -> bytes:
    """SHA-256 of the layout's fingerprint: equal for all workers that can exchange KV."""
    return engine_hash(fingerprint(layout))


def pair_faults_of(members: Iterable[registry_pb2.Member]) -> list[PairFault]:
    """As pair_faults, for the members of a registry. Raises LayoutMismatch as layout_from_proto does."""
    sides = [(member.role, pair_side(member)) for member in members if member.HasField("layout")]
    return pair_faults(
        [side for role, side in sides if role in COMPUTE_PROMPTS],
        [side for role, side in sides if role in GENERATE],
    )


def pair_side(member: registry_pb2.Member) -> PairSide:
    """A worker's record as a member of pairs. Raises LayoutMismatch as layout_from_proto does."""
    layout = layout_from_proto(member.layout)
    return PairSide(member.worker_id, member.model, layout, member.transport)
