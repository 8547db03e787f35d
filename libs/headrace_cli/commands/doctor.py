"""`headrace doctor`: finds what is wrong with a deployment and with this host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from headrace_cli.addressed import AddressedCommand
from headrace_cli.client import registry_of
from headrace_cli.doctor.checks import (
    Finding,
    Verdict,
    check_credentials,
    check_members,
    check_software,
    check_versions,
    find_members,
)
from headrace_cli.doctor.rdma import check_rdma
from headrace_cli.options import DEFAULT_ROUTER, Registry, Router
from headrace_cli.output import EXIT_FAILED, Json, answer_console, print_json, run_command
from headrace_common.errors import HeadraceError

_STYLES: Final = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.ERROR: "red"}


def register(app: typer.Typer) -> None:
    """Adds `headrace doctor`."""
    app.command(
        cls=AddressedCommand,
        epilog="Examples:  headrace doctor   |   headrace doctor --registry 10.0.0.1:7051",
    )(doctor)


def doctor(
    router: Router = DEFAULT_ROUTER,
    registry: Registry = "",
    as_json: Json = False,
) -> None:
    """Checks credentials, members, clocks, RDMA and software. Exit status 1 after an error."""

    async def work() -> None:
        report(await examine(registry, router), as_json=as_json)

    run_command(work())


def report(findings: Sequence[Finding], *, as_json: bool) -> None:
    """Prints the findings. Raises typer.Exit with status 1 when there is an error."""
    if as_json:
        print_json({"findings": list(map(asdict, findings))})
    else:
        answer_console().print(_table(findings))
    if any(finding.verdict is Verdict.ERROR for finding in findings):
        raise typer.Exit(EXIT_FAILED)


async def examine(registry: str, router: str) -> list[Finding]:
    """All checks. An empty `registry` means that of the deployment with `router`."""
    findings = check_credentials()
    try:
        found = await registry_of(router, registry)
    except HeadraceError as error:
        remedy = "start a deployment, or name its registry"
        return [
            *findings,
            Finding(Verdict.ERROR, "registry", error.detail, remedy),
            *_about_this_host(),
        ]
    members, about_registry = await find_members(found)
    about_members = [
        *await check_members(members),
        *check_versions(members),
    ]
    return [*findings, *about_registry, *about_members, *_about_this_host()]


def _about_this_host() -> list[Finding]:
    return [*check_rdma(), *check_software()]


def _table(findings: Sequence[Finding]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for title in ("", "subject", "finding", "remedy"):
        table.add_column(title, overflow="fold")
    for one in findings:
        verdict = Text(one.verdict, style=_STYLES[one.verdict])
        table.add_row(verdict, Text(one.subject), Text(one.detail), Text(one.remedy))
    return table
