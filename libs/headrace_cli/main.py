"""The `headrace` command: what a person types, and how failures look."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace_cli.client import chat_request, open_router
from headrace_cli.commands.chat import ChatOptions, chat_once, converse, summary
from headrace_cli.commands.demo import DEFAULT_PROMPT, run_demo
from headrace_cli.commands.drain import drain_worker
from headrace_cli.commands.policy import set_policy, show_policy
from headrace_cli.commands.route import route_view
from headrace_cli.commands.trace import show_trace, traces_table
from headrace_cli.commands.workers import reset_caches, workers_view
from headrace_cli.console import answer_console, notice_console
from headrace_cli.pair.proxy import Listening, run_pair
from headrace_cli.up.state import find_registry
from headrace_cli.up.topology import DEFAULT_PORT, SIM, Topology, parse_setting
from headrace_cli.up.up import run_up
from headrace_common.errors import Cancelled, ConfigError, HeadraceError
from headrace_common.limits import DRAIN_GRACE_MAX_S, PAGE_SIZE_MAX

EXIT_FAILED = 1
EXIT_MISCONFIGURED = 2
EXIT_INTERRUPTED = 130
DEFAULT_ROUTER = f"127.0.0.1:{DEFAULT_PORT}"
DEFAULT_MODEL = Path("models/SmolLM2-135M-Instruct")

app = typer.Typer(
    name="headrace",
    help="Serves large language models with prefill and decode on separate workers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

policy_app = typer.Typer(
    no_args_is_help=True, help="Shows and changes the policy that all routers follow."
)
app.add_typer(policy_app, name="policy")

Router = Annotated[
    str,
    typer.Option(
        "--router", metavar="HOST:PORT", envvar="HEADRACE_ENDPOINT", help="Router to call."
    ),
]
Registry = Annotated[
    str,
    typer.Option(metavar="HOST:PORT", help="Registry to ask; empty means that of `headrace up`."),
]
Engine = Annotated[str, typer.Option(help="vllm for real models, sim for the simulated one.")]
Model = Annotated[
    str,
    typer.Option(
        metavar="FOLDER",
        help=f"Model in the Hugging Face layout; for vllm the default is {DEFAULT_MODEL}.",
    ),
]
PrefillCount = Annotated[int, typer.Option("--prefill", min=0, help="Prefill workers.")]
DecodeCount = Annotated[int, typer.Option("--decode", min=1, help="Decode workers.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port of the router; 0 takes any.")]
Store = Annotated[
    str, typer.Option(help="Where the registry keeps its records: memory, or etcd://HOST:PORT.")
]
TensorParallel = Annotated[
    str,
    typer.Option(
        metavar="N or N:M", help="Ranks of each worker; N:M gives prefill N and decode M."
    ),
]
CpuThreads = Annotated[int, typer.Option(min=1, help="Compute threads of each worker on CPUs.")]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="SERVICE.FIELD=VALUE",
        help="Any other setting of a service; may be repeated. `headrace-decode --help` has its own.",
    ),
]
Logs = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER", help="Where logs go; the default is in ~/.local/state/headrace."
    ),
]
MaxTokens = Annotated[
    int, typer.Option(min=0, help="Most tokens to generate; 0 means what the context leaves.")
]
Temperature = Annotated[
    float | None, typer.Option(min=0, max=2, help="Randomness; 0 is greedy. [default: 1]")
]
Seed = Annotated[int | None, typer.Option(min=0, help="Makes sampling repeatable.")]


@app.command(
    epilog="Examples:  headrace up   |   headrace up --engine sim --prefill 2 --decode 2   |   "
    "headrace up --model ~/models/SmolLM2-135M-Instruct --set decode.kv_cache_gib=2"
)
def up(
    engine: Engine = "vllm",
    model: Model = "",
    prefill: PrefillCount = 1,
    decode: DecodeCount = 1,
    port: Port = DEFAULT_PORT,
    store: Store = "memory",
    tensor_parallel: TensorParallel = "1",
    cpu_threads: CpuThreads = 1,
    settings: Settings = None,
    logs: Logs = None,
) -> None:
    """Starts registry, router and workers on this machine, and stops them on Ctrl-C."""

    async def work() -> None:
        topology = _topology(
            engine, model, (prefill, decode), port, store, tensor_parallel, cpu_threads, settings
        )
        await run_up(topology, logs, notice_console())

    _run(work())


@app.command(
    epilog="Examples:  headrace demo   |   headrace demo 'Name three rivers.'   |   "
    "headrace demo --engine sim"
)
def demo(  # noqa: PLR0913, PLR0917 - every option is one of the user's
    prompt: Annotated[str, typer.Argument(envvar="PROMPT", help="What to ask.")] = DEFAULT_PROMPT,
    engine: Engine = "vllm",
    model: Model = "",
    prefill: PrefillCount = 1,
    decode: DecodeCount = 1,
    port: Port = 0,
    store: Store = "memory",
    tensor_parallel: TensorParallel = "1",
    cpu_threads: CpuThreads = 1,
    settings: Settings = None,
    logs: Logs = None,
    max_tokens: MaxTokens = 64,
) -> None:
    """Starts everything, asks one question, shows where the time went, and stops everything."""

    async def work() -> None:
        topology = _topology(
            engine, model, (prefill, decode), port, store, tensor_parallel, cpu_threads, settings
        )
        options = ChatOptions(max_tokens=max_tokens, temperature=0.0)
        question = prompt.strip() or DEFAULT_PROMPT
        await run_demo(topology, logs, question, options, (answer_console(), notice_console()))

    _run(work())


@app.command(
    epilog="Examples:  headrace chat   |   headrace chat 'Why is the sky blue?' --max-tokens 80   |   "
    "echo Hello | headrace chat"
)
def chat(
    prompt: Annotated[str, typer.Argument(help="What to ask; without it, a conversation.")] = "",
    router: Router = DEFAULT_ROUTER,
    model: Annotated[str, typer.Option(help="Model to ask; empty means the only one.")] = "",
    system: Annotated[str, typer.Option(help="What the model is told before everything.")] = "",
    max_tokens: MaxTokens = 0,
    temperature: Temperature = None,
    seed: Seed = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that an answer may take.")] = 300,
) -> None:
    """Asks the model: once with a prompt, else in a conversation that remembers."""
    options = ChatOptions(model, max_tokens, temperature, seed, system, timeout)

    async def work() -> None:
        async with open_router(router) as client:
            answer = await chat_once(client, prompt, options)
            if sys.stderr.isatty():
                notice_console().print(summary(answer), style="dim")

    if prompt:
        _run(work())
    else:
        with _failures():
            converse(router, options)


@app.command(
    epilog="Examples:  headrace route 'Why is the sky blue?'   |   "
    "headrace route --explain 'Why is the sky blue?'"
)
def route(
    prompt: Annotated[str, typer.Argument(help="What would be asked.")],
    router: Router = DEFAULT_ROUTER,
    model: Annotated[str, typer.Option(help="Model to ask; empty means the only one.")] = "",
    system: Annotated[str, typer.Option(help="What the model is told before everything.")] = "",
    explain: Annotated[
        bool, typer.Option("--explain", help="List the candidates and what each would cost.")
    ] = False,
) -> None:
    """Says where a prompt would go now, and why, and sends it nowhere."""
    messages = [("system", system)] if system else []

    async def work() -> None:
        async with open_router(router) as client:
            routed = await client.explain(chat_request([*messages, ("user", prompt)], model=model))
            answer_console().print(route_view(routed, explain=explain))

    _run(work())


@app.command(epilog="Examples:  headrace workers   |   headrace workers --registry 127.0.0.1:7001")
def workers(
    router: Router = DEFAULT_ROUTER,
    registry: Registry = "",
) -> None:
    """Lists who is registered and what each worker is doing."""

    async def work() -> None:
        answer_console().print(await workers_view(registry or find_registry(router)))

    _run(work())


@app.command(
    "reset-cache",
    epilog="Examples:  headrace reset-cache decode-0   |   "
    "headrace reset-cache prefill-0 decode-0 --timeout 30",
)
def reset_cache(
    worker_ids: Annotated[list[str], typer.Argument(metavar="WORKER...", help="Worker ids.")],
    router: Router = DEFAULT_ROUTER,
    registry: Registry = "",
    timeout: Annotated[
        float, typer.Option(min=0.5, max=60, help="Seconds to wait for running requests.")
    ] = 10.0,
) -> None:
    """Empties workers' prefix caches; routers hear of it at once."""

    async def work() -> None:
        await reset_caches(registry or find_registry(router), worker_ids, timeout)

    _run(work())


@app.command(
    epilog="Examples:  headrace drain decode-0   |   headrace drain prefill-1 --grace 120 --no-wait"
)
def drain(
    worker: Annotated[str, typer.Argument(help="Its id, as `headrace workers` shows it.")],
    router: Router = DEFAULT_ROUTER,
    registry: Registry = "",
    grace: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=DRAIN_GRACE_MAX_S,
            help="Seconds that what it has may take; the rest goes on elsewhere. "
            "[default: the worker's drain_grace_s]",
        ),
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Return once it has ended, or at once.")
    ] = True,
) -> None:
    """Ends a worker as SIGTERM does: it takes nothing new, finishes what it has, and goes."""

    async def work() -> None:
        found = registry or find_registry(router)
        await drain_worker(found, worker, grace, wait=wait, console=answer_console())

    _run(work())


@app.command(
    epilog="Examples:  headrace trace   |   headrace trace my-request --no-layers   |   "
    "headrace trace --list 10"
)
def trace(
    id: Annotated[  # noqa: A002, the name that the help shows
        str, typer.Argument(metavar="[ID]", help="Trace id or request id; empty means the newest.")
    ] = "",
    router: Router = DEFAULT_ROUTER,
    layers: Annotated[
        bool, typer.Option("--layers/--no-layers", help="One line per layer, or one for all.")
    ] = True,
    list_count: Annotated[
        int,
        typer.Option(
            "--list", metavar="N", min=0, max=PAGE_SIZE_MAX, help="List the newest N instead."
        ),
    ] = 0,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait for the last spans.")] = 2.0,
) -> None:
    """Draws where one request's time went, over all processes."""

    async def work() -> None:
        console = answer_console()
        async with open_router(router) as client:
            if list_count:
                console.print(await traces_table(client, list_count))
            else:
                show_trace(await client.trace(id, wait), console, layers=layers)

    _run(work())


@app.command(
    epilog="Example:  headrace pair --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200"
)
def pair(
    prefill: Annotated[
        str, typer.Option(metavar="URL", help="vLLM server with kv_role kv_producer or kv_both.")
    ],
    decode: Annotated[
        str, typer.Option(metavar="URL", help="vLLM server with kv_role kv_consumer or kv_both.")
    ],
    pair_address: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="The prefill server's `listen` setting.")
    ] = "127.0.0.1:7730",
    host: Annotated[str, typer.Option(help="Host to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on.")] = 8000,
    timeout: Annotated[float, typer.Option(min=0.001, help="Most seconds of a request.")] = 600.0,
    transfer_timeout: Annotated[
        float, typer.Option(min=0.001, help="Seconds after which decode prefills by itself.")
    ] = 60.0,
) -> None:
    """Joins two vLLM servers that have Headrace's connector; needs no service of Headrace."""

    _run(run_pair(prefill, decode, pair_address, Listening(host, port), timeout, transfer_timeout))


@policy_app.command("get", epilog="Example:  headrace policy get")
def get_policy(router: Router = DEFAULT_ROUTER, registry: Registry = "") -> None:
    """Shows the policy in force."""

    async def work() -> None:
        answer_console().print(await show_policy(registry or find_registry(router)))

    _run(work())


@policy_app.command(
    "set",
    epilog="Examples:  headrace policy set local_prefill_max_tokens=256 temperature=0.2   |   "
    "headrace policy set max_queue_wait=2s   |   headrace policy set tenant_weights.batch=0.5   |   "
    "headrace policy set temperature=",
)
def change_policy(
    changes: Annotated[
        list[str],
        typer.Argument(metavar="FIELD=VALUE...", help="Nothing after = restores the default."),
    ],
    router: Router = DEFAULT_ROUTER,
    registry: Registry = "",
) -> None:
    """Changes the named fields; every router follows within a second."""

    async def work() -> None:
        answer_console().print(await set_policy(registry or find_registry(router), changes))

    _run(work())


def main() -> None:
    """Entry point."""
    app()


def _topology(
    engine: str,
    model: str,
    counts: tuple[int, int],
    port: int,
    store: str,
    tensor_parallel: str,
    cpu_threads: int,
    settings: list[str] | None,
) -> Topology:
    ranks = parse_ranks(tensor_parallel)
    folder = model
    if not folder and engine != SIM and DEFAULT_MODEL.is_dir():
        folder = str(DEFAULT_MODEL)
    return Topology(
        engine=engine,
        model=folder,
        prefill_count=counts[0],
        decode_count=counts[1],
        port=port,
        store=store,
        prefill_tensor_parallel=ranks[0],
        decode_tensor_parallel=ranks[1],
        cpu_threads=cpu_threads,
        settings=tuple(parse_setting(text) for text in settings or ()),
    )


def parse_ranks(text: str) -> tuple[int, int]:
    """Reads "2" or "2:1" as ranks of prefill and decode. Raises ConfigError."""
    first, colon, second = text.partition(":")
    sides = (first, second if colon else first)
    if not all(side.isdecimal() and int(side) > 0 for side in sides):
        raise ConfigError(
            f"--tensor-parallel {text!r} is wrong: write N, or N:M for prefill and decode"
        )
    return int(sides[0]), int(sides[1])


def _run(work: Coroutine[Any, Any, None]) -> None:
    with _failures():
        asyncio.run(work)


@contextmanager
def _failures() -> Iterator[None]:
    """Turns failures into one line and an exit status."""
    try:
        yield
    except ConfigError as error:
        _fail(error, EXIT_MISCONFIGURED)
    except Cancelled as error:
        _fail(error, EXIT_INTERRUPTED)
    except HeadraceError as error:
        _fail(error, EXIT_FAILED)
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except BrokenPipeError:
        sys.stderr.close()
        raise typer.Exit(EXIT_FAILED) from None


def _fail(error: HeadraceError, status: int) -> None:
    line = " ".join(error.detail.split())
    notice_console().print(f"headrace: {line}", style="red", markup=False)
    raise typer.Exit(status) from None
