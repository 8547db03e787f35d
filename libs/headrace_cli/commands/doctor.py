"""`headrace doctor`: finds what is wrong with a deployment and with this host, and writes firewall rules."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Annotated, Final

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from headrace_cli.client import list_members
from headrace_cli.console import answer_console, notice_console
from headrace_cli.contexts.choice import AddressedCommand
from headrace_cli.doctor.credentials import check_credentials
from headrace_cli.doctor.finding import Finding, Verdict
from headrace_cli.doctor.firewall import Surroundings, check_rules, rule_set
from headrace_cli.doctor.members import check_members, check_pairs, find_members
from headrace_cli.doctor.pool import check_pool
from headrace_cli.doctor.this_host import check_host
from headrace_cli.exit_status import EXIT_FAILED, run_command
from headrace_cli.json_output import Json, print_record
from headrace_cli.options import DEFAULT_ROUTER, Registry, Router
from headrace_cli.records import DoctorRecord, FindingRecord
from headrace_cli.up.state import find_registry
from headrace_common.errors import NotFound

_STYLES: Final = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.ERROR: "red"}


def register(app: typer.Typer) -> None:
    """Adds `headrace doctor`."""
    app.command(
        cls=AddressedCommand,
        epilog="Examples:  headrace doctor   |   headrace doctor --registry 10.0.0.1:7051 --firewall --host 10.0.0.7 "
        "--operator 10.0.9.0/24 > headrace.nft",
    )(doctor)


def doctor(
    router: Router = DEFAULT_ROUTER,
    registry: Registry = "",
    firewall: Annotated[
        bool, typer.Option("--firewall", help="Write nftables rules for this host instead.")
    ] = False,
    host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST",
            help="With --firewall: address or name of the host that the rules are for; may be repeated. "
            "[default: this host's name]",
        ),
    ] = None,
    operator: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NETWORK",
            help="With --firewall: network that runs `headrace` commands; may be repeated.",
        ),
    ] = None,
    client: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NETWORK",
            help="With --firewall: network of clients that call decode workers with tickets; may be repeated.",
        ),
    ] = None,
    etcd: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="With --firewall: the registry's etcd.")
    ] = "",
    pool: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="The remote pool's master: checks that it answers; with --firewall, writes its rules.",
        ),
    ] = "",
    as_json: Json = False,
) -> None:
    """Checks credentials, members, clocks, ports and the kernel. Exit status 1 when there is an error."""

    async def work() -> None:
        if firewall:
            found = registry or find_registry(router)
            around = Surroundings(
                host=tuple(host or [socket.gethostname()]),
                registry=found,
                etcd=etcd,
                pool=pool,
                operators=tuple(operator or ()),
                clients=tuple(client or ()),
            )
            rules = rule_set(await list_members(found), around)
            if note := check_rules(rules):
                notice_console().print(note, markup=False)
            typer.echo(rules, nl=False)
            return
        findings = await examine(registry, router)
        if pool:
            findings.append(await check_pool(pool))
        if as_json:
            print_record(doctor_record(findings))
        else:
            answer_console().print(_table(findings))
        if any(finding.verdict is Verdict.ERROR for finding in findings):
            raise typer.Exit(EXIT_FAILED)

    run_command(work())


async def examine(registry: str, router: str) -> list[Finding]:
    """All checks. An empty `registry` means that of the deployment on this machine with `router`."""
    findings = check_credentials()
    try:
        found = registry or find_registry(router)
    except NotFound as error:
        remedy = "start a deployment, or name its registry"
        return [
            *findings,
            Finding(Verdict.ERROR, "registry", error.detail, remedy),
            *check_host(),
        ]
    members, about_registry = await find_members(found)
    about_members = [*await check_members(members), *check_pairs(members)]
    return [*findings, *about_registry, *about_members, *check_host()]


def doctor_record(findings: Sequence[Finding]) -> DoctorRecord:
    """The findings for programs."""
    return DoctorRecord(
        [
            FindingRecord(str(one.verdict), one.subject, one.detail, one.remedy or None)
            for one in findings
        ]
    )


def _table(findings: Sequence[Finding]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for title in ("", "subject", "finding", "remedy"):
        table.add_column(title, overflow="fold")
    for one in findings:
        verdict = Text(one.verdict, style=_STYLES[one.verdict])
        table.add_row(verdict, Text(one.subject), Text(one.detail), Text(one.remedy))
    return table
