"""`headrace size`: bytes of KV by prompt length, the time of their transfer, and the workers that a load needs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer
from rich import box
from rich.table import Table

from headrace_cli.output import Json, answer_console, failures_as_exit, print_json
from headrace_common.errors import ConfigError
from headrace_common.trace_view.verdict import format_ms
from headrace_kv.layout.time_model import EFFICIENCY, KvShape, exposed_s, kv_shape, transfer_s
from headrace_text.model_hub import fetch_model, parse_hub_model

_CONFIG: Final = "config.json"
_CONFIG_BYTES_MAX: Final = 1 << 20


def read_model_config(model: str) -> dict[str, Any]:
    """The config.json of a file, a folder, or "hf:OWNER/NAME" on a hub. Raises ConfigError with the remedy."""
    try:
        hub_model = parse_hub_model(model)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    path = Path(model) if hub_model is None else fetch_model(hub_model, (_CONFIG,))
    if path.is_dir():
        path /= _CONFIG
    try:
        with path.open("rb") as file:
            content = file.read(_CONFIG_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}; name a config.json or a model's folder"
        ) from error
    if len(content) > _CONFIG_BYTES_MAX:
        raise ConfigError(f"{path} has more than {_CONFIG_BYTES_MAX} bytes: name a config.json")
    try:
        config = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: name a config.json") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is not an object: name a config.json")
    return config


PLANNED_SHARE: Final = 0.8
"""Share of its speed that a worker is planned to use. The rest is for bursts."""
_PARTS: Final = 3
_NUMBER_MAX: Final = 1e9

Limit = Literal["compute", "link"]
"""What a worker of the count uses most of: its computing, or its link."""


@dataclass(frozen=True, slots=True)
class Load:
    """A mean load: requests per second, and the tokens of each prompt and each answer."""

    requests_per_s: float
    prompt_tokens: float
    answer_tokens: float


@dataclass(frozen=True, slots=True)
class WorkerSpeeds:
    """Tokens per second that one prefill worker computes and that one decode worker generates, and each one's link."""

    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    gbit_per_s: float


@dataclass(frozen=True, slots=True)
class WorkerCount:
    """The least count of workers of one role. `share` is what each of them uses of its limit, at most PLANNED_SHARE."""

    role: Literal["prefill", "decode"]
    count: int
    limit: Limit
    share: float


def parse_load(text: str) -> Load:
    """A load from "RATE,PROMPT,ANSWER". Raises ConfigError."""
    try:
        numbers = [float(part) for part in text.split(",", _PARTS)]
    except ValueError:
        numbers = []
    if len(numbers) != _PARTS or not all(0 < number <= _NUMBER_MAX for number in numbers):
        raise ConfigError(
            "--load: give requests per second, prompt tokens and answer tokens, such as 20,2000,300"
        )
    return Load(*numbers)


def worker_counts(
    load: Load, token_bytes: int, speeds: WorkerSpeeds
) -> tuple[WorkerCount, WorkerCount]:
    """The prefill workers and the decode workers. All KV of prompts is taken to be computed and transferred.

    Without prefix hits this is what a load needs, so it is too much for a load with them.
    """
    prompt_tokens_per_s = load.requests_per_s * load.prompt_tokens
    # Seconds of one link, in each second.
    link = prompt_tokens_per_s * transfer_s(token_bytes, speeds.gbit_per_s)
    prefill: dict[Limit, float] = {
        "compute": prompt_tokens_per_s / speeds.prefill_tokens_per_s,
        "link": link,
    }
    decode: dict[Limit, float] = {
        "compute": load.requests_per_s * load.answer_tokens / speeds.decode_tokens_per_s,
        "link": link,
    }
    return _count("prefill", prefill), _count("decode", decode)


def _count(role: Literal["prefill", "decode"], used: Mapping[Limit, float]) -> WorkerCount:
    """`used`: how many workers would be busy all the time."""
    limit = max(used, key=lambda one: used[one])
    # Of a count that only the rounding of numbers raises, a billionth is dropped.
    count = max(1, math.ceil(used[limit] / PLANNED_SHARE - 1e-9))
    return WorkerCount(role, count, limit, used[limit] / count)


_LENGTHS_MAX: Final = 64
_LENGTH_MAX: Final = 1 << 30
_MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class SizeRow:
    """One prompt length. `compute_ms` and `hidden` are None without a rate of computing."""

    tokens: int
    payload_bytes: int
    transfer_ms: float
    compute_ms: float | None
    exposed_ms: float
    hidden: bool | None


@dataclass(frozen=True, slots=True)
class Sizes:
    """The KV of a model, and the workers that a load needs."""

    attention: str
    dtype: str
    layers: int
    token_bytes: int
    gbit_per_s: float
    efficiency: float
    hidden_up_to_tokens_per_s: float
    rows: list[SizeRow]
    workers: list[WorkerCount] = field(default_factory=list)


def register(app: typer.Typer) -> None:
    """Adds `headrace size`."""
    app.command(
        epilog="Examples:  headrace size models/my-model --gbit 100   |   "
        "headrace size hf:OWNER/NAME --gbit 400 --load 20,2000,300 --compute-rate 20000 --decode-rate 3000"
    )(size)


def size(
    model: Annotated[
        str,
        typer.Argument(
            help="A model's config.json, the folder with it, or hf:OWNER/NAME on a Hugging Face hub."
        ),
    ],
    gbit: Annotated[
        float,
        typer.Option(
            min=0.001, max=100_000, help="Bandwidth between prefill and decode, in Gbit/s."
        ),
    ] = 100.0,
    tokens: Annotated[
        str,
        typer.Option(
            metavar="N,N", help="Prompt lengths in tokens.", show_default="1000 to 128000"
        ),
    ] = "1000,2000,16000,64000,128000",
    dtype: Annotated[
        str, typer.Option(help="Element type of the KV cache.", show_default="the model's own")
    ] = "",
    compute_rate: Annotated[
        float,
        typer.Option(
            min=0, max=1e9, help="Tokens per second that one prefill worker computes; 0 if unknown."
        ),
    ] = 0.0,
    decode_rate: Annotated[
        float,
        typer.Option(
            min=0,
            max=1e9,
            help="Tokens per second that one decode worker generates, of all its requests.",
        ),
    ] = 0.0,
    load: Annotated[
        str,
        typer.Option(
            metavar="RATE,PROMPT,ANSWER",
            help="Requests per second, prompt tokens and answer tokens: shows how many workers they need.",
        ),
    ] = "",
    as_json: Json = False,
) -> None:
    """Shows how much KV a prompt has, how long its transfer takes, and how much of that computing hides.

    With --load, also how many prefill and decode workers a load needs.
    """
    with failures_as_exit():
        shape = kv_shape(read_model_config(model), dtype)
        sizes = kv_sizes(shape, gbit, _lengths(tokens), compute_rate)
        if load:
            speeds = WorkerSpeeds(compute_rate, decode_rate, gbit)
            sizes = replace(sizes, workers=_workers(parse_load(load), shape, speeds))
        if as_json:
            print_json(asdict(sizes))
        else:
            _show(sizes)


def kv_sizes(shape: KvShape, gbit_per_s: float, lengths: list[int], compute_rate: float) -> Sizes:
    """The sizes and times. Without a `compute_rate`, in tokens per second, computing is taken to hide what it can."""
    rows = []
    for length in lengths:
        payload_bytes = length * shape.token_bytes
        moved_s = transfer_s(payload_bytes, gbit_per_s)
        computed_s = length / compute_rate if compute_rate else None
        shown_s = exposed_s(moved_s, shape.layer_count, computed_s)
        rows.append(
            SizeRow(
                tokens=length,
                payload_bytes=payload_bytes,
                transfer_ms=1e3 * moved_s,
                compute_ms=None if computed_s is None else 1e3 * computed_s,
                exposed_ms=1e3 * shown_s,
                hidden=None if computed_s is None else moved_s <= computed_s,
            )
        )
    return Sizes(
        attention=shape.attention,
        dtype=shape.dtype,
        layers=shape.layer_count,
        token_bytes=shape.token_bytes,
        gbit_per_s=gbit_per_s,
        efficiency=EFFICIENCY,
        hidden_up_to_tokens_per_s=1.0 / transfer_s(shape.token_bytes, gbit_per_s),
        rows=rows,
    )


def _workers(load: Load, shape: KvShape, speeds: WorkerSpeeds) -> list[WorkerCount]:
    if not speeds.prefill_tokens_per_s or not speeds.decode_tokens_per_s:
        raise ConfigError("--load: give --compute-rate and --decode-rate too, of one worker each")
    return list(worker_counts(load, shape.token_bytes, speeds))


def _show(sizes: Sizes) -> None:
    console = answer_console()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    computed = any(row.compute_ms is not None for row in sizes.rows)
    for title in ("tokens", "KV", "transfer", *(("compute",) if computed else ()), "exposed"):
        table.add_column(title, justify="right")
    for row in sizes.rows:
        compute = () if row.compute_ms is None else (_ms(row.compute_ms),)
        late = "" if row.hidden is not False else " (slower than computing)"
        table.add_row(
            f"{row.tokens:,}",
            # The small part rounds a half up.
            f"{row.payload_bytes / _MIB + 1e-9:,.2f} MiB",
            f"{row.transfer_ms:,.2f} ms",
            *compute,
            f"{_ms(row.exposed_ms)}{late}",
        )
    console.print(table)
    console.print(
        f"{sizes.layers} layers of {sizes.attention.upper()}, {sizes.dtype}: {sizes.token_bytes:,} bytes a token, "
        f"at {sizes.efficiency:.0%} of {sizes.gbit_per_s:g} Gbit/s. Computing hides all but the last layer's "
        f"transfer, 1/{sizes.layers}, up to {sizes.hidden_up_to_tokens_per_s:,.0f} tokens/s of prefill on one link.",
        markup=False,
        highlight=False,
    )
    for one in sizes.workers:
        limit = "computing" if one.limit == "compute" else "its link"
        console.print(
            f"{one.role}: {_counted(one.count)}, each with {one.share:.0%} of {limit} in use "
            f"(at most {PLANNED_SHARE:.0%} is planned).",
            markup=False,
            highlight=False,
        )


def _counted(count: int) -> str:
    return f"{count:,} worker" if count == 1 else f"{count:,} workers"


def _ms(milliseconds: float) -> str:
    return format_ms(round(milliseconds * 1e6))


def _lengths(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if len(parts) > _LENGTHS_MAX:
        raise ConfigError(f"--tokens: give at most {_LENGTHS_MAX} lengths")
    wrong = [part for part in parts if not (part.isascii() and part.isdecimal())]
    lengths = [] if wrong else [int(part) for part in parts if len(part) < 20]
    if wrong or len(lengths) < len(parts) or not all(0 < one <= _LENGTH_MAX for one in lengths):
        raise ConfigError(
            f"--tokens: give whole numbers from 1 to {_LENGTH_MAX}, such as 1000,16000"
        )
    return lengths
