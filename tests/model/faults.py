"""The faults of the model's world."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from headrace_common.errors import TransferFailed
from tests.model.ground import LEASE_S, LONG_S, Action, Script
from tests.model.streams import Wire

if TYPE_CHECKING:
    from tests.model.world import World


def possible_faults(world: World) -> list[Action]:
    """The faults that are possible now."""
    return [*_wire_faults(world), *_write_faults(world), *_process_faults(world)]


def _wire_faults(world: World) -> Iterator[Action]:
    now_s = world.timers.time()
    for number, stream in enumerate(world.streams):
        for direction in ("to_decode", "to_prefill"):
            wire = stream.wire(direction)
            name = f"{number} {direction}"
            if not stream.sender_end.over and wire.open_s <= now_s:
                for delay_s in (0.5 * LEASE_S, LONG_S):
                    yield f"cut {name} for {delay_s:g}", partial(cut, wire, now_s + delay_s)
            if not stream.ready(direction) or wire.messages[0] is None:
                continue
            yield f"lose {name}", wire.messages.popleft
            yield f"repeat {name}", partial(wire.messages.appendleft, wire.messages[0])
            if len(wire.messages) > 1:
                yield f"reorder {name}", partial(wire.messages.rotate, 1)
        if not stream.sender_end.over:
            broken = TransferFailed("the model breaks the stream")
            yield f"break {number} at prefill", partial(stream.sender_end.end, broken)
            yield f"break {number} at decode", partial(stream.end_at_decode, broken)


def _write_faults(world: World) -> Iterator[Action]:
    for number, write in enumerate(world.writes):
        if write.future is not None and not write.late:
            yield f"fail write {number}", partial(world.lose, write)
            yield f"fail write {number} late", partial(world.fail_late, write)
            yield f"slow write {number}", partial(world.slow, write)


def _process_faults(world: World) -> Iterator[Action]:
    now_s = world.timers.time()
    for script in world.scripts:
        if script.steps and script.open_s <= now_s:
            for delay_s in (2.0, LONG_S):
                yield (
                    f"pause {script.name} for {delay_s:g}",
                    partial(pause, script, now_s + delay_s),
                )
    for rank in world.ranks:
        for transfer_id in sorted(rank.opened - rank.reports.keys()):
            yield (
                f"stop {transfer_id} at {rank.rank}",
                partial(rank.sender.stop, transfer_id, "CANCELLED", "the model"),
            )
    for transfer_id, transfer in world.transfers.items():
        if transfer.active:
            yield (
                f"cancel {transfer_id}",
                partial(world.receiver.cancel, transfer_id, "CANCELLED", "the model"),
            )
    yield "crash prefill", world.crash_prefill
    if world.retries_left:
        yield "crash decode", world.crash_decode


def cut(wire: Wire, open_s: float) -> None:
    wire.open_s = open_s


def pause(script: Script, open_s: float) -> None:
    script.open_s = open_s
