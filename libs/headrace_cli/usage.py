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

from headrace.inference.v1 import load_pb2
from headrace.registry.v1 import registry_pb2
from headrace.worker.v1 import time_model_pb2
from headrace_cli.client import WAIT_S, Wait, open_router_internally, registry_of
from headrace_cli.members import Row, member_rows
from headrace_cli.options import DEFAULT_ROUTER, Registry, Router
from headrace_cli.output import (
    Column,
    Json,
    answer_console,
    command,
    fitted_table,
    message_object,
    notice_console,
    option,
    print_json,
)
from headrace_common.durations import unix_s_from_timestamp
from headrace_common.errors import HeadraceError
from headrace_common.time_model.receipts import add_receipt

_HOURS_MAX: Final = 168
_COUNTS: Final = ("request_count", "prompt_tokens", "answer_tokens", "sent_bytes")
_NUMBERS: Final = ("requests", "prompt tokens", "answer tokens", "prefill s", "decode s", "KV GB h")
_SERVICE: Final = ("Headrace", "AI and Machine Learning", "Headrace")
FOCUS_COLUMNS: Final = (
    *("ChargeCategory", "ChargePeriodStart", "ChargePeriodEnd"),
    *("ConsumedQuantity", "ConsumedUnit", "ProviderName", "ServiceCategory", "ServiceName"),
    *("SkuId", "SubAccountId", "x_Model", "x_Adapter"),
)
"""Names of the FinOps Open Cost and Usage Specification. Those of Headrace begin with "x_"."""


class By(StrEnum):
    """What a line of the table stands for."""

    TENANT = "tenant"
    MODEL = "model"
    ADAPTER = "adapter"


@command(
    "usage",
    "headrace usage   |   headrace usage --by model --since 1   |   headrace usage --csv",
)
async def usage(
    by: Annotated[By, option("What a line stands for.")] = By.TENANT,
    since: Annotated[
        float, option("Hours that count, whole.", metavar="HOURS", min=0, max=_HOURS_MAX)
    ] = 24.0,
    as_csv: Annotated[
        bool, option("Print a line for each hour, in columns of FOCUS.", "--csv")
    ] = False,
    router: Router = DEFAULT_ROUTER,
    registry: Registry = "",
    wait: Wait = WAIT_S,
    as_json: Json = False,
) -> None:
    """Shows what requests have cost: device time and KV memory, over all routers."""

    rows = await member_rows(await registry_of(router, registry))
    lines = await _read(rows, time.time_ns() - int(since * 3.6e12))
    times = {row.member.worker_id: row.status.device_time for row in rows if row.status is not None}
    if as_csv:
        writer = csv.writer(sys.stdout)
        writer.writerow(FOCUS_COLUMNS)
        writer.writerows(focus_rows(lines))
    elif as_json:
        workers = {name: message_object(one) for name, one in times.items()}
        print_json({"usages": list(map(message_object, lines)), "workers": workers})
    else:
        _show(by, sums_by(by, lines), times.values())


async def _read(rows: Iterable[Row], since_unix_ns: int) -> list[load_pb2.HourlyUsage]:
    failures: list[HeadraceError] = []

    async def of_router(router: registry_pb2.Member) -> Sequence[load_pb2.HourlyUsage]:
        try:
            async with open_router_internally(router.endpoint) as client:
                return await client.usages(since_unix_ns)
        except HeadraceError as error:
            failures.append(error)
            notice_console().print(f"{router.worker_id} is left out: {error.detail}", markup=False)
            return ()

    routers = [row.member for row in rows if row.member.role == registry_pb2.Member.ROLE_ROUTER]
    found = await asyncio.gather(*map(of_router, routers))
    if failures and len(failures) == len(routers):
        raise failures[0]
    return [line for lines in found for line in lines]


def sums_by(by: By, lines: Iterable[load_pb2.HourlyUsage]) -> dict[str, load_pb2.HourlyUsage]:
    """The sums over all lines of a tenant, model or adapter."""
    sums: dict[str, load_pb2.HourlyUsage] = {}
    for line in lines:
        total = sums.setdefault(getattr(line, by), load_pb2.HourlyUsage())
        for name in _COUNTS:
            setattr(total, name, getattr(total, name) + getattr(line, name))
        add_receipt(total.receipt, line.receipt)
    return sums


def focus_rows(lines: Iterable[load_pb2.HourlyUsage]) -> Iterator[tuple[Any, ...]]:
    """Rows of FOCUS_COLUMNS. What the operator pays has the account "operator"."""
    for line in lines:
        start = datetime.fromtimestamp(unix_s_from_timestamp(line.start_time), UTC)
        period = [f"{one:%Y-%m-%dT%H:%M:%SZ}" for one in (start, start + timedelta(hours=1))]
        receipt = line.receipt
        charges = [
            ("prefill", 1e-6 * receipt.prefill_device_us, "Seconds"),
            ("decode", 1e-6 * receipt.decode_device_us, "Seconds"),
            ("failed-attempts", 1e-6 * receipt.operator_device_us, "Seconds"),
            *((f"kv-{use.tier}", use.byte_seconds / 3.6e12, "GB-Hours") for use in receipt.kv),
            ("transfer", 1e-9 * line.sent_bytes, "GB"),
        ]
        for sku, quantity, unit in charges:
            account = "operator" if sku == "failed-attempts" else line.tenant
            if quantity:
                place = (sku, account, line.model, line.adapter)
                yield ("Usage", *period, round(quantity, 9), unit, *_SERVICE, *place)


def _show(
    by: By, sums: dict[str, load_pb2.HourlyUsage], times: Iterable[time_model_pb2.DeviceTime]
) -> None:
    console, totals = answer_console(), sums.values()
    columns = (Column(by, rank=1), *(Column(name, right=True) for name in _NUMBERS))
    console.print(
        fitted_table(console, columns, [_cells(name, sums[name]) for name in sorted(sums)])[0]
    )
    failed_s = 1e-6 * sum(total.receipt.operator_device_us for total in totals)
    times = list(times)
    idle_s = 1e-6 * sum(one.idle_us for one in times)
    open_s = 1e-6 * sum(one.computing_us - one.billed_us for one in times)
    console.print(f"operator: {failed_s:.1f} s of attempts that failed")
    console.print(
        f"workers, since their start: {idle_s:.1f} s idle, {open_s:.1f} s in steps without a receipt"
    )


def _cells(name: str, total: load_pb2.HourlyUsage) -> tuple[str, ...]:
    receipt = total.receipt
    seconds = (1e-6 * receipt.prefill_device_us, 1e-6 * receipt.decode_device_us)
    kv_gb_h = sum(use.byte_seconds for use in receipt.kv) / 3.6e12
    counts = (total.request_count, total.prompt_tokens, total.answer_tokens)
    return (name or "-", *map(str, counts), *(f"{one:.1f}" for one in seconds), f"{kv_gb_h:.3g}")
