"""What the doctor finds in the reports of members."""

from __future__ import annotations

import pytest

from headrace.registry.v1 import registry_pb2
from headrace_cli import checks
from headrace_cli.checks import clock_findings

_Role = registry_pb2.Member.Role

_SECOND_NS = 10**9


@pytest.mark.parametrize(
    ("sent_s", "text"),
    [(0.0, ""), (97.0, "3.0 s behind"), (99.5, ""), (101.5, ""), (104.0, "3.0 s ahead of")],
)
def test_a_clock_that_is_far_off_is_named(sent_s: float, text: str) -> None:
    found = clock_findings("w", int(sent_s * _SECOND_NS), 100 * _SECOND_NS, 101 * _SECOND_NS)
    assert [text in one.detail for one in found] == ([True] if text else [])


@pytest.mark.parametrize(
    ("roles", "missing"),
    [
        ((_Role.ROLE_ROUTER, _Role.ROLE_DECODE), []),
        ((_Role.ROLE_ROUTER, _Role.ROLE_BOTH), []),
        (
            (_Role.ROLE_PREFILL,),
            ["no router is registered", "no worker that generates is registered"],
        ),
    ],
)
async def test_a_deployment_without_a_needed_member_is_named(
    monkeypatch: pytest.MonkeyPatch, roles: tuple[_Role.ValueType, ...], missing: list[str]
) -> None:
    async def list_members(registry: str) -> list[registry_pb2.Member]:
        return [registry_pb2.Member(role=role) for role in roles]

    monkeypatch.setattr(checks, "list_members", list_members)
    _, (listed, *findings) = await checks.find_members("registry")
    assert listed.verdict is checks.Verdict.OK
    assert [one.detail for one in findings] == missing
