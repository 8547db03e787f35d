"""Chaos, in short: nothing is wrong, late or left behind; and each safeguard's loss would be noticed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.plan import ChaosPlan, scenario
from tests.chaos.processes import Place
from tests.chaos.run import ChaosReport, run_chaos
from tests.fork_server import forking

# A machine of half the speed takes 3 minutes instead of 35 s.
pytestmark = [pytest.mark.etcd, pytest.mark.timeout(600)]

SEED = 20


async def chaos(plan: ChaosPlan, folder: Path) -> ChaosReport:
    async with forking() as spawn:
        return await run_chaos(plan, folder, Place(spawn=spawn))


async def test_500_requests_through_killed_frozen_and_restarted_services(tmp_path: Path) -> None:
    report = await chaos(scenario("all", SEED, 500), tmp_path)
    assert not report.violations
    assert report.process_faults.total() >= 3
    assert report.wire_faults["lost"]
    assert report.wire_faults["doubled"]
    assert report.outcomes.counts["right"] > 300
    # Of about 90 tokens each.
    assert report.outcomes.transferred_tokens > 10_000


async def test_a_run_of_doubled_acknowledgements_finds_nothing(tmp_path: Path) -> None:
    report = await chaos(scenario("ledger", SEED, 150), tmp_path)
    assert not report.violations


@pytest.mark.parametrize(
    ("safeguard", "requests"), [("ledger", 150), ("quarantine", 120), ("lease", 200)]
)
async def test_the_loss_of_a_safeguard_is_noticed(
    safeguard: str, requests: int, tmp_path: Path
) -> None:
    report = await chaos(scenario(safeguard, SEED, requests, broken=safeguard), tmp_path)
    assert report.violations
