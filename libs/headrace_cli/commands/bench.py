"""`headrace bench`: puts a server under load and reports its latencies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from headrace_cli.console import answer_console
from headrace_cli.contexts.choice import AddressedCommand
from headrace_cli.exit_status import run_command
from headrace_cli.load.bench import BenchOptions, run_bench
from headrace_cli.load.report import lines, times_table
from headrace_cli.load.workload import REQUESTS_MAX
from headrace_cli.options import DEFAULT_ROUTER, RequestModel, Router
from headrace_common.errors import InternalError


def register(app: typer.Typer) -> None:
    """Adds `headrace bench`."""
    app.command(
        cls=AddressedCommand,
        epilog="Examples:  headrace bench --requests 200 --concurrency 32   |   "
        "headrace bench --url http://127.0.0.1:7056 --rate 4 --goodput ttft:500 --goodput tpot:50",
    )(bench)


def bench(  # noqa: PLR0913, PLR0917 - typer makes an option of each
    router: Router = DEFAULT_ROUTER,
    url: Annotated[
        str,
        typer.Option(
            metavar="URL", help="OpenAI HTTP API to call instead of a router's gRPC, of any server."
        ),
    ] = "",
    model: RequestModel = "",
    requests: Annotated[int, typer.Option(min=1, max=REQUESTS_MAX, help="Requests to send.")] = 100,
    concurrency: Annotated[
        int, typer.Option(min=1, max=65_536, help="Most requests in flight.")
    ] = 16,
    rate: Annotated[
        float,
        typer.Option(min=0, help="Requests a second; 0 sends one as soon as another has ended."),
    ] = 0,
    burstiness: Annotated[
        float,
        typer.Option(min=0.01, help="With --rate: 1 is a Poisson process, less is burstier."),
    ] = 1,
    dataset: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Requests from lines of JSON, a ShareGPT file or a trace of Mooncake's, instead of random ones.",
        ),
    ] = None,
    trace_speed: Annotated[
        float, typer.Option(min=0.001, help="Factor on the pace of a trace.")
    ] = 1,
    input_tokens: Annotated[int, typer.Option(help="Mean length of random prompts.")] = 512,
    output_tokens: Annotated[
        int, typer.Option(help="Mean length of answers; their bound with --dataset.")
    ] = 128,
    range_ratio: Annotated[
        float, typer.Option(help="Spread of random lengths: 0.2 is plus or minus a fifth.")
    ] = 0,
    prefix_tokens: Annotated[
        int, typer.Option(help="Tokens that random prompts share, on top of their length.")
    ] = 0,
    prefixes: Annotated[int, typer.Option(help="Different shared prefixes.")] = 1,
    warmup: Annotated[
        int, typer.Option(min=0, max=10_000, help="Requests before the run that are not measured.")
    ] = 0,
    goodput: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME:MS",
            help="Objective for ttft, tpot, itl or e2el; may be repeated.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Equal seeds make equal requests.")] = 0,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that an answer may take.")] = 600,
    json_output: Annotated[
        bool, typer.Option("--json", help="Print the results as JSON, with every request.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File for the JSON as well.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE.svg", help="File for a picture of the latencies.")
    ] = None,
) -> None:
    """Sends requests to a router, or to any server with OpenAI's API, and reports latencies and goodput."""
    given = {name: value for name, value in locals().items() if name != "json_output"}
    options = BenchOptions(**given | {"goodput": tuple(goodput or ())})

    async def work() -> None:
        result = await run_bench(options)
        if json_output:
            typer.echo(json.dumps(result.record, indent=1))
        else:
            console = answer_console()
            for line in lines(result.summary):
                console.print(line)
            console.print(times_table(result.summary))
        if not result.summary.completed:
            first = next(one for one in result.record["requests"] if one["failure"])
            raise InternalError(f"no request succeeded; the first: {first['detail']}")

    run_command(work())
