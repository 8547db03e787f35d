"""Which prefill and decode workers cannot hand KV over to each other, and why (I8). Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from headrace_kv.layout.compatibility import fingerprint, layout_differences
from headrace_kv.layout.layout import KvLayout

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
        key = (side.model, fingerprint(side.layout), side.transport)
        groups.setdefault(key, []).append(side)
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
