"""Landed bytes are compared with the sent bytes before the transfer completes (I3)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from headrace_common.errors import KvCorrupt, ProtocolViolation, TransferFailed
from headrace_kv.handoff.checksum import DigestMode, is_digested
from headrace_kv.handoff.messages import Reservation
from headrace_kv.layout.layout import KvDescriptor
from headrace_kv.receive.ledger import LayerLanded
from headrace_kv.receive.observer import TransferState
from headrace_kv.receive.verification import DigestChecks
from headrace_kv.send.loop import WriteDigests
from tests.component.kv.harness import (
    BLOCK_TOKENS,
    BLOCKS,
    TOKENS,
    Arena,
    LentMooncake,
    make_layout,
    running,
)
from tests.in_memory_transport import Fault, FaultKind, FaultPlan
from tests.waiting import until


def checks(mode: DigestMode, mismatch_limit: int = 3) -> Callable[[KvDescriptor], DigestChecks]:
    return partial(DigestChecks, mode=mode, mismatch_limit=mismatch_limit)


@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (2, 1), (1, 4), (4, 2), (8, 4)])
async def test_undamaged_transfers_complete(prefill: int, decode: int) -> None:
    async with running(prefill, decode, make_checks=checks("on")) as rig:
        transfer = rig.start(TOKENS - 1)
        # In chunks: each has digests of its own.
        for start, end in ((0, BLOCK_TOKENS + 1), (BLOCK_TOKENS + 1, TOKENS - 1)):
            rig.push(transfer.transfer_id, BLOCKS, start, end)
        await rig.received(transfer)
        assert transfer.state is TransferState.FREE


async def test_a_changed_bit_fails_its_transfer_and_names_the_key() -> None:
    faults = FaultPlan({4: Fault(FaultKind.CORRUPT)})
    async with running(faults=faults, make_checks=checks("on")) as rig:
        broken, fine = rig.send(), rig.start(first_block=20)
        with pytest.raises(KvCorrupt, match="layer 3 from rank 0 to rank 0") as raised:
            await broken.wait()
        assert raised.value.metadata["keys"] == "layer 3 from rank 0 to rank 0"
        assert raised.value.metadata["prefill"] == str(rig.prefill_ref)
        await until(lambda: rig.released_ids() == [broken.transfer_id])
        assert rig.receiver.rejected_senders == ()
        rig.push(fine.transfer_id)
        await rig.received(fine)


@pytest.mark.parametrize(
    ("mode", "counts"), [("on", {30}), ("off", {0}), ("sampled", set(range(12)))]
)
async def test_damage_is_found_in_every_digested_layer(mode: DigestMode, counts: set[int]) -> None:
    faults = FaultPlan(every=Fault(FaultKind.CORRUPT))
    layout = make_layout(1, layers=30)
    make_checks = checks(mode) if mode != "off" else None
    async with running(layout, layout, faults=faults, make_checks=make_checks) as rig:
        transfer = rig.send()
        share = rig.receiver.welcome().digest_share
        sampled = [one for one in range(30) if is_digested(share, transfer.transfer_id, one)]
        assert len(sampled) in counts
        if sampled:
            with pytest.raises(KvCorrupt) as raised:
                await transfer.wait()
            named = raised.value.metadata["keys"].split(";")[0].split()[1]
            assert int(named) in sampled
        else:
            await transfer.wait()


async def test_a_sender_of_repeated_corrupt_transfers_is_rejected() -> None:
    faults = FaultPlan(every=Fault(FaultKind.CORRUPT))
    async with running(faults=faults, make_checks=checks("on", 2)) as rig:
        for count in range(2):
            assert rig.receiver.rejected_senders == ()
            with pytest.raises(KvCorrupt):
                await rig.send().wait()
            await until(lambda n=count: len(rig.released) == n + 1)  # type: ignore[misc]
        assert rig.receiver.rejected_senders == (rig.prefill_ref,)
        refused = rig.start()
        (report,) = await rig.quiet(refused.transfer_id)
        assert report.reason == TransferFailed.reason
        assert "arrived corrupt" in report.detail
        # Another worker may still send it.
        assert refused.state is TransferState.RESERVED


async def test_a_missing_digest_fails_the_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WriteDigests, "on_acknowledge", lambda *_: None)
    async with running(make_checks=checks("on")) as rig:
        with pytest.raises(ProtocolViolation, match="no digest of layer 0"):
            await rig.send().wait()
        await until(lambda: bool(rig.released))


class LaterCorruption(DigestChecks):
    """Changes decode's memory after a range has landed, before it is read back."""

    arena: Arena | None = None

    def find_corrupt(
        self, reservation: Reservation, ranges: tuple[LayerLanded, ...], seed: int
    ) -> tuple[LayerLanded, ...]:
        if self.arena is not None and any(landed.layer == 2 for landed in ranges):
            self.arena.cells[2, 1, reservation.block_ids[1], 0, 5] ^= 0x10
            self.arena = None
        return super().find_corrupt(reservation, ranges, seed)


async def test_memory_that_changes_after_mooncakes_write_is_found(mooncake: LentMooncake) -> None:
    made: list[LaterCorruption] = []

    def make_checks(descriptor: KvDescriptor) -> DigestChecks:
        made.append(LaterCorruption(descriptor, "on"))
        return made[-1]

    async with running(1, 1, mooncake, make_checks=make_checks) as rig:
        await rig.received(rig.send())
        made[0].arena = rig.destinations[0]
        with pytest.raises(KvCorrupt, match="layer 2 from rank 0 to rank 0"):
            await rig.send().wait()
        await until(lambda: len(rig.released) == 1)
        assert np.count_nonzero(rig.destinations[0].cells) > 0
