"""`python -m tests.chaos`: one run and its table. The exit status is 1 if a promise was broken."""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.chaos.identities import CredentialKind
from tests.chaos.plan import SCENARIOS, scenario
from tests.chaos.run import ChaosReport, run_chaos

SHOWN = 20


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=None, help="the same one gives the same faults")
    parser.add_argument("--scenario", choices=SCENARIOS, default="all")
    parser.add_argument(
        "--credentials",
        choices=tuple(CredentialKind),
        default=CredentialKind.TLS,
        help="what proves the roles: mutual TLS, tokens, or the key of this user",
    )
    parser.add_argument(
        "--break",
        dest="broken",
        default="",
        help="quarantine, lease, ledger, kill_timer or pool_seal",
    )
    parser.add_argument(
        "--tiers", action="store_true", help="with tiers below a KV memory that is too small"
    )
    parser.add_argument(
        "--pool", action="store_true", help="with such tiers, and a remote pool that fails too"
    )
    parser.add_argument(
        "--both",
        action="store_true",
        help="with workers of both roles only, and other roles by policy each second",
    )
    parser.add_argument(
        "--hostile", action="store_true", help="with a further worker of each role that lies"
    )
    parser.add_argument("--folder", type=Path, default=None, help="for logs; a new one by default")
    parser.add_argument("--seconds", type=float, default=math.inf, help="sends none after that")
    arguments = parser.parse_args()
    seed = random.randrange(1 << 31) if arguments.seed is None else arguments.seed
    plan = scenario(
        *(arguments.scenario, seed, arguments.requests, arguments.broken, arguments.credentials),
        tiers=arguments.tiers,
        pool=arguments.pool,
        both=arguments.both,
        mixed=True,
        hostile=arguments.hostile,
    )
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="headrace-chaos-"))
    console = Console(width=110)
    console.print(f"seed {seed}, credentials {arguments.credentials}, logs in {folder}")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "errors.log").open("w", encoding="utf-8") as errors:
        report = ChaosReport(plan)
        report.outcomes.on_error = lambda line: print(line, file=errors, flush=True)
        asyncio.run(run_chaos(plan, folder, report=report, last_s=arguments.seconds))
    show(report, console)
    return 1 if report.violations else 0


def show(report: ChaosReport, console: Console) -> None:
    """The table of faults and outcomes."""
    outcomes = report.outcomes
    table = Table(title=f"{report.requests} requests in {report.seconds:.0f} s")
    table.add_column("")
    table.add_column("count", justify="right")
    for title, counts in (
        ("processes", report.process_faults),
        ("messages", report.wire_faults),
        ("tiers", report.tier_counts),
        ("moves", report.moves),
        ("requests", outcomes.counts),
        ("decisions", report.decisions),
        *((f"kind {kind}", counts) for kind, counts in sorted(outcomes.kinds.items())),
    ):
        table.add_section()
        for what, count in sorted(counts.items()):
            table.add_row(f"{title}: {what}", str(count))
    table.add_section()
    table.add_row("tokens with transferred KV", str(outcomes.transferred_tokens))
    table.add_row("seconds for which the clients stood still", f"{outcomes.stood_still_s:.1f}")
    table.add_row("wrong, late or unnamed outcomes", str(len(outcomes.violations)))
    table.add_row("processes that ended by themselves", str(len(report.crashes)))
    table.add_row("free blocks written to", str(report.foreign_blocks))
    table.add_row("blocks lost or counted twice", str(len(report.unconserved)))
    table.add_row("workers that hold something afterwards", str(len(report.left_behind)))
    console.print(table)
    for line in outcomes.errors[:SHOWN]:
        console.print(f"  {line}", style="dim", markup=False)
    for line in report.violations[:SHOWN]:
        console.print(f"  {line}", style="bold red", markup=False)


if __name__ == "__main__":
    sys.exit(main())
