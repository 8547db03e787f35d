"""A short chaos run finds no violation, and detects each safeguard that is switched off."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chaos.plan import ChaosPlan, Kind, scenario
from tests.chaos.processes import Place
from tests.chaos.run import ChaosReport, run_chaos
from tests.fork_server import forking

# A machine of half the speed needs 3 minutes instead of 35 s.
pytestmark = [pytest.mark.etcd, pytest.mark.timeout(600)]

SEED = 20


async def chaos(
    plan: ChaosPlan, folder: Path, enough: Callable[[ChaosReport], bool] | None = None
) -> ChaosReport:
    async with forking() as spawn:
        return await run_chaos(plan, folder, Place(spawn=spawn), enough=enough)


@pytest.mark.core
async def test_450_requests_through_killed_frozen_and_restarted_services(tmp_path: Path) -> None:
    report = await chaos(scenario("all", SEED, 450, credentials="tls", mixed=True), tmp_path)
    assert not report.violations
    assert set(report.outcomes.kinds) == set(Kind)
    assert all(counts["right"] for counts in report.outcomes.kinds.values())
    assert report.outcomes.kinds[Kind.PROMISE]["promised"]
    assert report.process_faults.total() >= 3
    assert report.wire_faults["lost"]
    assert report.wire_faults["doubled"]
    # Most others were cancelled, or asked a router that was killed.
    assert report.outcomes.counts["right"] > 80
    # Each request has about 90 tokens.
    assert report.outcomes.transferred_tokens > 4_000


@pytest.mark.in_turn
async def test_workers_that_lie_spoil_only_the_requests_that_they_get(tmp_path: Path) -> None:
    plan = scenario("all", SEED, 300, credentials="tokens", mixed=True, hostile=True)
    report = await chaos(plan, tmp_path)
    assert not report.violations
    assert report.outcomes.counts["right"] > 80
    assert report.outcomes.counts["of a hostile worker: wrong tokens"]
    lies = [name for name in report.wire_faults if name.startswith("lie: ")]
    # Seventeen kinds, of which a few are rare.
    assert len(lies) > 10


async def test_duplicate_acknowledgements_cause_no_violation(tmp_path: Path) -> None:
    report = await chaos(scenario("ledger", SEED, 150, credentials="tokens"), tmp_path)
    assert not report.violations


@pytest.mark.in_turn
async def test_blocks_of_every_tier_are_used_and_conserved(tmp_path: Path) -> None:
    ways = ("DEVICE to HOST", "HOST to DISK", "HOST to DEVICE", "DISK to DEVICE")
    wanted = {"blocks changed on the disk", *(f"blocks from {way}" for way in ways)}

    # On a slow machine, a run may load few blocks from the disk, and none that was changed.
    for seed in range(SEED, SEED + 4):
        folder = tmp_path / str(seed)
        folder.mkdir()
        report = await chaos(scenario("tiers", seed, 150), folder)
        assert not report.violations
        wanted -= (+report.tier_counts).keys()
        if not wanted:
            return
    pytest.fail(f"no run had {', '.join(sorted(wanted))}")


@pytest.mark.in_turn
async def test_a_pool_that_is_killed_frozen_and_restarted_costs_no_answer(tmp_path: Path) -> None:
    def used(report: ChaosReport) -> bool:
        return bool(report.process_faults and report.tier_counts["blocks from the pool"])

    # On a slow machine, a run may find the pool lost whenever a block is wanted.
    for seed in range(SEED, SEED + 4):
        folder = tmp_path / str(seed)
        folder.mkdir()
        report = await chaos(scenario("pool", seed, 200), folder)
        assert not report.violations
        if used(report):
            return
    pytest.fail("no run has lost the pool and read a block from it")


async def test_senders_that_are_frozen_within_a_write_end_and_write_nothing(tmp_path: Path) -> None:
    def ended(report: ChaosReport) -> bool:
        return bool(report.process_faults["sender ended within a write"])

    # On a slow machine, a run may freeze no sender within a write.
    for seed in range(SEED, SEED + 4):
        folder = tmp_path / str(seed)
        folder.mkdir()
        report = await chaos(scenario("kill_timer", seed, 400), folder, ended)
        assert not report.violations
        if ended(report):
            return
    pytest.fail("no run has frozen a sender within a write")


async def test_roles_that_change_each_second_cost_no_answer(tmp_path: Path) -> None:
    plan = scenario("roles", SEED, 100_000, both=True)
    async with forking() as spawn:
        report = await run_chaos(plan, tmp_path, Place(spawn=spawn), last_s=10.0)
    assert not report.violations
    assert not report.outcomes.errors
    assert report.process_faults["roles changed"] >= 5
    assert report.outcomes.transferred_tokens


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("safeguard", "requests"),
    [("ledger", 150), ("quarantine", 120), ("lease", 200), ("kill_timer", 200), ("pool_seal", 150)],
)
async def test_a_missing_safeguard_is_detected(
    safeguard: str, requests: int, tmp_path: Path
) -> None:
    # On a slow machine, the faults of a run may meet no request at the moment that the safeguard is for.
    for seed in range(SEED, SEED + 5):
        folder = tmp_path / str(seed)
        folder.mkdir()
        plan = scenario(safeguard, seed, requests, broken=safeguard)
        report = await chaos(plan, folder, lambda report: bool(report.violations))
        if report.violations:
            return
    pytest.fail(f"no run has detected that {safeguard} is off")
