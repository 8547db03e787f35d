"""What the doctor finds in the list of members."""

from __future__ import annotations

from headrace.registry.v1 import registry_pb2
from headrace_cli.doctor.finding import Verdict
from headrace_cli.doctor.members import check_pairs
from tests.component.registry.harness import worker


def pair(prefill_transport: str, decode_transport: str) -> list[registry_pb2.Member]:
    members = [worker("prefill-0", role=registry_pb2.Member.ROLE_PREFILL), worker("decode-0")]
    members[0].transport, members[1].transport = prefill_transport, decode_transport
    return members


def test_workers_that_cannot_hand_kv_over_are_a_warning() -> None:
    assert check_pairs(pair("mooncake", "mooncake")) == []
    (finding,) = check_pairs(pair("in_memory", "mooncake"))
    assert finding.verdict is Verdict.WARNING
    assert "transport (in_memory != mooncake)" in finding.detail


def test_an_impossible_layout_is_an_error() -> None:
    members = pair("mooncake", "mooncake")
    members[1].layout.stage_starts.extend([7, 3])
    (finding,) = check_pairs(members)
    assert finding.verdict is Verdict.ERROR
    assert "pipeline stages" in finding.detail
