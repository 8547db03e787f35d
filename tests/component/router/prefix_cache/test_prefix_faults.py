"""Workers that hash prefixes in another way than the router get no credit, and the reason is visible."""

from __future__ import annotations

import io
import logging

import pytest
from rich.console import Console

from headrace.worker.v1 import worker_pb2
from headrace_cli.commands.route import candidates_table
from headrace_kv.prefix.hashing import key_fingerprint
from tests.kit.router import PREFIX_KEY, Rig
from tests.kit.workers import reply
from tests.sim_layout import LAYOUT
from tests.waiting import until

_OURS = worker_pb2.KvHashing(
    key_fingerprint=key_fingerprint(PREFIX_KEY), block_tokens=LAYOUT.block_tokens
)


async def test_a_worker_with_other_hashing_appears_in_warning_and_explanation(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    await rig.add_decode(reply("ok"), _OURS)
    await rig.add_decode(reply("ok"))
    with caplog.at_level(logging.WARNING, "headrace_router.prefix_cache.directory"):
        foreign = await rig.add_decode(
            reply("ok"), worker_pb2.KvHashing(key_fingerprint=0xABCD, block_tokens=32)
        )
        faults = rig.router.prefixes.faults
        await until(lambda: len(faults) == 1)
    ((ref, fault),) = faults.items()
    assert ref.worker_id == foreign.member.worker_id
    assert fault == (
        "it hashes blocks of 32 tokens under key 0000abcd, this router blocks of 16 tokens under key "
        f"{key_fingerprint(PREFIX_KEY):08x}"
    )
    assert [record.getMessage() for record in caplog.records] == [
        f"{ref} gets no credit for its cache: {fault}"
    ]
    routed = await rig.route()
    shown = {one.worker_id: one.prefix_fault for one in routed.candidates}
    assert shown == {"d0": "", "d1": "", "d2": fault}
    cells = list(candidates_table(routed, Console(file=io.StringIO())).columns[-1].cells)
    assert [str(cell) for cell in cells if fault in str(cell)] == [
        f"unpaired; without credit for its cache: {fault}"
    ]
    listed = await rig.models()
    assert listed.prefix_key_fingerprint == key_fingerprint(PREFIX_KEY)
    rig.decodes.remove(foreign)
    rig.refresh()
    assert not faults
    await foreign.kill()
