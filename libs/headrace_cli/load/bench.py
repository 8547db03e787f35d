"""One run, from its options to its results."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from headrace_cli.client import open_router, read_api_key
from headrace_cli.console import notice_console
from headrace_cli.load.dataset import read_dataset
from headrace_cli.load.grpc_target import GrpcTarget
from headrace_cli.load.report import as_json, draw
from headrace_cli.load.run import Target, run_load
from headrace_cli.load.sample import RequestSample
from headrace_cli.load.summary import Summary, parse_objectives, summarize
from headrace_cli.load.workload import PlannedRequest, RandomShape, at_rate, random_requests
from headrace_common.access.credentials import TlsFiles
from headrace_common.errors import ConfigError
from headrace_common.extras import require_extra
from headrace_common.version import version

PLANNED_TOKENS_MAX: Final = 100_000_000


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """The options of `headrace bench`, which describes them."""

    router: str
    url: str
    model: str
    requests: int
    concurrency: int
    rate: float
    burstiness: float
    dataset: Path | None
    trace_speed: float
    input_tokens: int
    output_tokens: int
    range_ratio: float
    prefix_tokens: int
    prefixes: int
    warmup: int
    goodput: tuple[str, ...]
    seed: int
    timeout: float
    output: Path | None
    picture: Path | None


@dataclass(frozen=True, slots=True)
class BenchResult:
    """`record`: all that was measured, as plain values."""

    summary: Summary
    record: dict[str, Any]


async def run_bench(options: BenchOptions) -> BenchResult:
    """Runs the load and writes the files that the options name.

    Raises ConfigError for wrong options before anything is sent.
    """
    objectives = parse_objectives(options.goodput)
    for path in (options.output, options.picture):
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"{path} cannot be written: its folder does not exist; make it")
    planned = plan_requests(options)
    warmup, measured = planned[: options.warmup], planned[options.warmup :]
    if options.rate:
        measured = at_rate(measured, options.rate, options.burstiness, options.seed)
    async with _open_target(options) as target:
        await run_load(target, warmup, concurrency=options.concurrency)
        samples, duration_s = await _run_with_progress(target, measured, options.concurrency)
    summary = summarize(samples, duration_s, objectives)
    record = as_json(_parameters(options), summary, samples)
    if options.output is not None:
        options.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if options.picture is not None:
        title = f"{options.url or options.router}: {summary.completed} requests"
        options.picture.write_text(draw(samples, title), encoding="utf-8")
    return BenchResult(summary, record)


def plan_requests(options: BenchOptions) -> list[PlannedRequest]:
    """The requests of the warm-up, then those of the run. Raises ConfigError."""
    count = options.warmup + options.requests
    if options.dataset is not None:
        return read_dataset(
            options.dataset,
            count,
            output_tokens=options.output_tokens,
            trace_speed=options.trace_speed,
        )
    shape = RandomShape(
        options.input_tokens,
        options.output_tokens,
        options.range_ratio,
        options.prefix_tokens,
        options.prefixes,
    )
    total = count * (shape.input_tokens + shape.prefix_tokens)
    if total > PLANNED_TOKENS_MAX:
        raise ConfigError(
            f"the prompts have {total:,} tokens, more than {PLANNED_TOKENS_MAX:,}: send fewer or shorter ones",
            metadata={"field": "requests"},
        )
    return random_requests(shape, count, options.seed)


def _parameters(options: BenchOptions) -> dict[str, Any]:
    given = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in asdict(options).items()
        if name not in ("output", "picture")
    }
    return {
        "version": version(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        **given,
    }


@asynccontextmanager
async def _open_target(options: BenchOptions) -> AsyncIterator[Target]:
    if not options.url:
        async with open_router(options.router) as router:
            yield GrpcTarget(router, options.model, options.timeout)
        return
    require_extra("headrace bench --url", "bench")
    from headrace_cli.load.http_target import open_http

    async with open_http(
        options.url,
        options.model,
        api_key=read_api_key(),
        timeout_s=options.timeout,
        concurrency=options.concurrency,
        tls=TlsFiles.from_environment(),
    ) as target:
        yield target


async def _run_with_progress(
    target: Target, requests: list[PlannedRequest], concurrency: int
) -> tuple[list[RequestSample], float]:
    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = notice_console()
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("requests", total=len(requests))
        return await run_load(
            target,
            requests,
            concurrency=concurrency,
            on_end=lambda sample: progress.advance(task),
        )
