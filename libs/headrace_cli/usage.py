"""`headrace usage`: what requests have cost, by tenant, model or adapter."""

from __future__ import annotations

import asyncio
import csv
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Annotated, Any, Final

import typer

from headrace.inference.v1 import load_pb2
from headrace.registry.v1 import registry_pb2
from headrace_cli.client import WAIT_S, Wait, open_router_internally, registry_of
from headrace_cli.members import Row, member_rows
from headrace_cli.options import DEFAULT_ROUTER, Registry, Router
from headrace_cli.output import (
    Column,
    Json,
    answer_console,
    fitted_table,
    message_object,
    print_json,
    run_command,
)
from headrace_common.durations import unix_s_from_timestamp
from headrace_frontend.running.receipt import add_receipt

_HOURS_MAX: Final = 168
_COLUMNS: Final = (
    Column("", rank=1),
    Column("Requests", right=True),
    Column("Prompt tokens", right=True),
    Column("Answer tokens", right=True),
    Column("Prefill s", right=True),
    Column("Decode s", right=True),
    Column("KV GB h", rank=2, right=True),
    Column("Sent GB", rank=2, right=True),
    Column("Computed again", rank=2, right=True),
)
FOCUS_COLUMNS: Final = (
    "ChargeCategory",
    "ChargePeriodStart",
    "ChargePeriodEnd",
    "ConsumedQuantity",
    "ConsumedUnit",
    "ProviderName",
    "ServiceCategory",
    "ServiceName",
    "SkuId",
    "SubAccountId",
    "x_Model",
    "x_Adapter",
)
"""Names of the FinOps Open Cost and Usage Specification. Its own columns begin with "x_"."""


class By(StrEnum):
    """What a line of the table stands for."""

    TENANT = "tenant"
    MODEL = "model"
    ADAPTER = "adapter"


@run_command
async def usage(
    by: Annotated[By, typer.Option(help="What a line stands for.")] = By.TENANT,
    since: Annotated[
        float,
        typer.Option(metavar="HOURS", min=0, max=_HOURS_MAX, help="Whole hours from then on."),
    ] = 24.0,
    as_csv: Annotated[
        bool, typer.Option("--csv", help="Print a line for each hour, in columns of FOCUS.")
    ] = False,
    router: Router = DEFAULT_ROUTER,
    registry: Registry = "",
    wait: Wait = WAIT_S,
    as_json: Json = False,
) -> None:
    """Shows what requests have cost: device time, KV memory and transfers, over all routers."""

    rows = await member_rows(await registry_of(router, registry))
    lines = await read_usages(rows, time.time_ns() - int(since * 3.6e12))
    if as_csv:
        writer = csv.writer(sys.stdout)
        writer.writerow(FOCUS_COLUMNS)
        writer.writerows(focus_rows(lines))
    elif as_json:
        workers = {row.member.worker_id: _device_time(row) for row in rows if row.status}
        print_json({"usages": list(map(message_object, lines)), "workers": workers})
    else:
        _show(sums_by(by, lines), rows)


async def read_usages(rows: Iterable[Row], since_unix_ns: int) -> list[load_pb2.HourlyUsage]:
    """The lines of all routers."""

    async def of_router(endpoint: str) -> Sequence[load_pb2.HourlyUsage]:
        async with open_router_internally(endpoint) as client:
            return await client.usages(since_unix_ns)

    routers = [row.member for row in rows if row.member.role == registry_pb2.Member.ROLE_ROUTER]
    found = await asyncio.gather(*(of_router(one.endpoint) for one in routers))
    return [line for lines in found for line in lines]


def sums_by(by: By, lines: Iterable[load_pb2.HourlyUsage]) -> dict[str, load_pb2.HourlyUsage]:
    """The sums over all lines of a tenant, model or adapter."""
    sums: dict[str, load_pb2.HourlyUsage] = {}
    for line in lines:
        total = sums.setdefault(getattr(line, by), load_pb2.HourlyUsage())
        for name in ("request_count", "prompt_tokens", "answer_tokens", "sent_bytes"):
            setattr(total, name, getattr(total, name) + getattr(line, name))
        add_receipt(total.receipt, line.receipt)
    return sums


def focus_rows(lines: Iterable[load_pb2.HourlyUsage]) -> Iterator[tuple[Any, ...]]:
    """Rows of FOCUS_COLUMNS. What the operator pays has the account "operator"."""
    for line in lines:
        start = datetime.fromtimestamp(unix_s_from_timestamp(line.start_time), UTC)
        period = [f"{one:%Y-%m-%dT%H:%M:%SZ}" for one in (start, start + timedelta(hours=1))]
        receipt, tenant = line.receipt, line.tenant
        charges = [
            ("prefill", tenant, 1e-6 * receipt.prefill_device_us, "Seconds"),
            ("decode", tenant, 1e-6 * receipt.decode_device_us, "Seconds"),
            ("failed-attempts", "operator", 1e-6 * receipt.operator_device_us, "Seconds"),
            *(
                (f"kv-{use.tier}", tenant, use.byte_seconds / 3.6e12, "GB-Hours")
                for use in receipt.kv
            ),
            ("transfer", tenant, 1e-9 * line.sent_bytes, "GB"),
        ]
        for sku, account, quantity, unit in charges:
            if quantity:
                service = ("Headrace", "AI and Machine Learning", "Headrace")
                place = (sku, account, line.model, line.adapter)
                yield ("Usage", *period, round(quantity, 9), unit, *service, *place)


def _device_time(row: Row) -> dict[str, float]:
    time = row.status.device_time if row.status is not None else None
    if time is None:
        return {}
    return {
        "idle_s": 1e-6 * time.idle_us,
        "computing_s": 1e-6 * time.computing_us,
        "billed_s": 1e-6 * time.billed_us,
    }


def _show(sums: dict[str, load_pb2.HourlyUsage], rows: Iterable[Row]) -> None:
    console = answer_console()
    cells = [_cells(name, total) for name, total in sorted(sums.items())]
    console.print(fitted_table(console, _COLUMNS, cells)[0])
    failed_s = 1e-6 * sum(total.receipt.operator_device_us for total in sums.values())
    times = [_device_time(row) for row in rows if row.status is not None]
    idle_s, computing_s, billed_s = (
        sum(one[name] for one in times) for name in ("idle_s", "computing_s", "billed_s")
    )
    console.print(f"operator: {failed_s:.1f} s of attempts that failed")
    open_s = computing_s - billed_s
    console.print(
        f"workers, since their start: {idle_s:.1f} s idle, {open_s:.1f} s in steps without a receipt"
    )


def _cells(name: str, total: load_pb2.HourlyUsage) -> tuple[str, ...]:
    receipt = total.receipt
    kv_gb_h = sum(use.byte_seconds for use in receipt.kv) / 3.6e12
    return (
        name or "-",
        str(total.request_count),
        str(total.prompt_tokens),
        str(total.answer_tokens),
        f"{1e-6 * receipt.prefill_device_us:.1f}",
        f"{1e-6 * receipt.decode_device_us:.1f}",
        f"{kv_gb_h:.3g}",
        f"{1e-9 * total.sent_bytes:.3g}",
        str(receipt.recomputed_tokens),
    )


def register(app: typer.Typer) -> None:
    """Adds `headrace usage`."""
    app.command(
        epilog="Examples:  headrace usage   |   headrace usage --by model --since 1   |   headrace usage --csv"
    )(usage)
