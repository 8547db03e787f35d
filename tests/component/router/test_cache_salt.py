"""Requests of one tenant carry one salt to every worker, through retries and migration."""

from __future__ import annotations

from headrace.inference.v1 import inference_pb2
from headrace_kv.prefix.cache_salt import is_cache_salt
from tests.kit.router import Rig, text_of, with_settings
from tests.kit.workers import TEXT, FakeDecode, fail, hand_over, recite, reply, sampling

REMOTE = inference_pb2.PREFILL_PLACEMENT_REMOTE
pytestmark = with_settings(
    tenants={f"{tenant}-{n}": tenant for tenant in ("tenant-a", "tenant-b") for n in (1, 2)}
)


async def test_tenants_have_opaque_salts_of_their_own(rig: Rig) -> None:
    decode = await rig.add_decode(reply("ok"))
    prefill = await rig.add_prefill(hand_over)
    for key in ("tenant-a-1", "tenant-a-2", "tenant-b-1"):
        await rig.ask(key=key, prefill_placement=REMOTE)
    first, second, third = (request.cache_salt for request in decode.requests)
    assert [task.cache_salt for task in prefill.tasks] == [first, second, third]
    assert first == second != third
    for salt in (first, third):
        assert salt
        assert is_cache_salt(salt)
        assert "tenant" not in salt


async def test_a_retried_and_migrated_request_keeps_its_salt(rig: Rig) -> None:
    await rig.add_decodes(recite(3, FakeDecode.die), recite(99))
    migrated = await rig.ask(key="tenant-a-1", sampling=sampling())
    failing = await rig.add_prefill(fail("TRANSFER_FAILED"))
    retried = await rig.ask(key="tenant-a-1", sampling=sampling())
    for responses in (migrated, retried):
        assert text_of(responses) == TEXT
        assert responses[-1].timing.attempts >= 2
    requests = [request for decode in rig.decodes for request in decode.requests]
    salt = requests[0].cache_salt
    assert salt
    assert len(requests) >= 4
    assert {request.cache_salt for request in requests} == {salt}
    assert [task.cache_salt for task in failing.tasks] == [salt]
