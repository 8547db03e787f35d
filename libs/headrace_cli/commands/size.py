"""`headrace size`: bytes of KV by prompt length, and the time of their transfer."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Final

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
    """The KV of a model."""

    attention: str
    dtype: str
    layers: int
    token_bytes: int
    gbit_per_s: float
    efficiency: float
    hidden_up_to_tokens_per_s: float
    rows: list[SizeRow]


def register(app: typer.Typer) -> None:
    """Adds `headrace size`."""
    app.command(
        epilog="Examples:  headrace size models/my-model --gbit 100   |   "
        "headrace size hf:OWNER/NAME --gbit 400 --compute-rate 20000"
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
    as_json: Json = False,
) -> None:
    """Shows how much KV a prompt has, how long its transfer takes, and how much of that computing hides."""
    with failures_as_exit():
        shape = kv_shape(read_model_config(model), dtype)
        sizes = kv_sizes(shape, gbit, _lengths(tokens), compute_rate)
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
