"""Landed bytes are compared with the sent bytes before the transfer completes (I3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pytest

from headrace_common.errors import KvCorrupt, ProtocolViolation, TransferFailed
from headrace_kv.checksum import DigestMode, is_digested
from headrace_kv.layout import KvDescriptor, RankMemory, Region
from headrace_kv.receive.transfer import TransferState
from headrace_kv.receive.verification import DigestChecks
from headrace_kv.send import writes
from headrace_kv.shard_map import place_regions
from tests.component.kv.harness import (
    make_layout,
    running,
)
from tests.in_memory_transport import Fault, FaultKind, FaultPlan
from tests.waiting import until


def checks(mode: DigestMode, mismatch_limit: int = 3) -> Callable[[KvDescriptor], DigestChecks]:
    return partial(DigestChecks, mode=mode, mismatch_limit=mismatch_limit)


@pytest.mark.parametrize("word_sums", [False, True])
async def test_a_changed_bit_fails_its_transfer_and_names_the_key(word_sums: bool) -> None:
    faults = FaultPlan({4: Fault(FaultKind.CORRUPT)})
    make_checks = partial(DigestChecks, mode="on", word_sums=word_sums)
    async with running(faults=faults, make_checks=make_checks) as rig:
        assert rig.receiver.welcome().word_sums is word_sums
        broken, fine = rig.send(), rig.start(first_block=20)
        with pytest.raises(KvCorrupt, match="layer 3 from rank 0 to rank 0") as raised:
            await broken.wait()
        assert raised.value.metadata["keys"] == "layer 3 from rank 0 to rank 0"
        assert raised.value.metadata["prefill"] == str(rig.prefill_ref)
        await until(lambda: rig.released_ids() == [broken.transfer_id])
        assert rig.receiver.rejected_senders == {}
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
            assert rig.receiver.rejected_senders == {}
            with pytest.raises(KvCorrupt):
                await rig.send().wait()
            await until(lambda n=count: len(rig.released) == n + 1)  # type: ignore[misc]
        assert list(rig.receiver.rejected_senders) == [rig.prefill_ref]
        refused = rig.start()
        (report,) = await rig.quiet(refused.transfer_id)
        assert report.reason == TransferFailed.reason
        assert "arrived corrupt" in report.detail
        # Another worker may still send it.
        assert refused.state is TransferState.RESERVED


async def test_a_missing_digest_fails_the_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writes, "is_digested", lambda *_: False)
    async with running(make_checks=checks("on")) as rig:
        with pytest.raises(ProtocolViolation, match="no digest of layer 0"):
            await rig.send().wait()
        await until(lambda: bool(rig.released))


@pytest.mark.parametrize("ranks", [1, 2])
def test_digests_of_blocks_show_any_changed_byte_of_them(ranks: int) -> None:
    layout = make_layout(ranks, layers=3)
    regions = [place_regions(layout, rank, (6,)).regions for rank in range(ranks)]
    size = max(region.end_bytes for found in regions for region in found)
    arenas = [np.zeros(size, np.uint8) for _ in range(ranks)]
    memories = tuple(
        RankMemory(rank, "t", "s", arena.ctypes.data, size, regions[rank])
        for rank, arena in enumerate(arenas)
    )
    found = DigestChecks(KvDescriptor(layout, memories), "on")
    try:
        before = found.digest_blocks((2, 3)).result(5)
        for arena in arenas:
            for address in range(0, size, 64):
                arena[address] += 1
                changed = [
                    one != two
                    for one, two in zip(before, found.digest_blocks((2, 3)).result(5), strict=True)
                ]
                arena[address] -= 1
                assert changed == [block == _block_at(regions[0], address) for block in (2, 3)]
    finally:
        found.close()


def _block_at(regions: Sequence[Region], address: int) -> int:
    region = next(one for one in regions if one.offset_bytes <= address < one.end_bytes)
    return (address - region.offset_bytes) // region.block_stride_bytes
