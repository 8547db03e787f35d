"""Hand-overs within a zone, and the roles of workers, by the deployment's policy."""

from __future__ import annotations

import pytest

from headrace.inference.v1 import first_token_pb2, inference_pb2
from headrace.registry.v1 import registry_pb2
from headrace_kv.layout import layout_to_proto
from tests.kit.router import Rig
from tests.kit.workers import FakePrefill, hand_over, reply
from tests.sim_layout import LAYOUT
from tests.waiting import until

REMOTE = inference_pb2.PREFILL_PLACEMENT_REMOTE


def _prefill_member(name: str, incarnation: str, zone: str) -> registry_pb2.Member:
    # The router has no connection to it, and fails to follow its cache.
    return registry_pb2.Member(
        worker_id=name,
        incarnation=incarnation,
        role=registry_pb2.Member.ROLE_PREFILL,
        endpoint="127.0.0.1:1",
        model="sim",
        layout=layout_to_proto(LAYOUT),
        place=registry_pb2.Place(zone=zone),
    )


@pytest.mark.parametrize("zone,remote", [("a", True), ("c", False)])
async def test_a_required_zone_decides_which_worker_prefills(
    rig: Rig, zone: str, remote: bool
) -> None:
    (decode,) = await rig.add_decodes(reply("yes"))
    decode.member.place.zone = zone
    far, near = [await rig.add_prefill(hand_over) for _ in range(2)]
    zones = ((far, "b"), (near, "a"))
    rig.router.update(
        [
            decode.member,
            *(_prefill_member(one.worker_id, one.incarnation, where) for one, where in zones),
        ]
    )
    rig.policy = registry_pb2.Policy(
        pair_level=registry_pb2.PAIR_LEVEL_ZONE,
        pair_rule=registry_pb2.PAIR_RULE_REQUIRE,
        first_token=first_token_pb2.FIRST_TOKEN_POLICY_DECODE,
    )
    for _ in range(3):
        responses = await rig.ask(prefill_placement=REMOTE)
        name = near.worker_id if remote else ""
        assert responses[-1].timing.prefill_worker_id == name
    assert (len(far.tasks), len(near.tasks)) == (0, 3 if remote else 0)


async def test_a_worker_of_both_roles_that_is_restricted_to_decode_pulls_no_prompts(
    rig: Rig,
) -> None:
    both = await rig.add_decode(reply("yes"))
    both.change_member(role=registry_pb2.Member.ROLE_BOTH)
    own = FakePrefill(
        both.member.worker_id, rig.handoff, hand_over, incarnation=both.member.incarnation
    )
    rig.prefills.append(await own.start(rig.internal_endpoint))
    other = await rig.add_prefill(hand_over)
    rig.refresh()
    await until(lambda: rig.pulling() == {own.worker_id, other.worker_id})
    rig.policy.worker_roles[own.worker_id] = registry_pb2.WORKER_ROLE_DECODE
    rig.refresh()
    assert rig.router.workers.table("sim").decode_only.all()
    assert rig.pulling() == {other.worker_id}
