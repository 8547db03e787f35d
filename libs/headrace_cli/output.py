"""Output of commands: consoles, JSON for programs, tables, and the exit status of a failure."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Annotated, Any, Final, ParamSpec

import typer
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand

from headrace_common.errors import Cancelled, ConfigError, HeadraceError, InternalError
from headrace_common.logs import CONTROL_ESCAPES

# Wide enough for rows with the longest names. Lines are not filled up to it.
PIPED_WIDTH = 1_000


class PlainConsole(Console):
    """Escapes characters that control a terminal: texts of clients and workers may have some."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        """As Console does."""
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control else Segment(text.translate(CONTROL_ESCAPES), style)


def answer_console() -> Console:
    """The console for results. Without a terminal it has no colour and a fixed width."""
    console = PlainConsole(highlight=False, soft_wrap=True)
    return console if console.is_terminal else PlainConsole(highlight=False, width=PIPED_WIDTH)


def notice_console() -> Console:
    """The console for progress, hints and errors."""
    return PlainConsole(stderr=True, highlight=False, soft_wrap=True)


def option(text: str, *words: str, **others: Any) -> Any:
    """An option with this help. Without `words`, its name is that of the parameter."""
    return typer.Option(*words, help=text, **others)


Json = Annotated[bool, option("Print one JSON document for programs.", "--json")]


def message_object(message: Message) -> dict[str, Any]:
    """A message by protobuf's JSON mapping, with the names of the proto's fields."""
    return MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )


def json_text(document: Mapping[str, Any]) -> str:
    """The document as text."""
    text = json.dumps(document, indent=2, ensure_ascii=False)
    return text.translate(CONTROL_ESCAPES)


def print_json(document: Mapping[str, Any]) -> None:
    """Writes the document to stdout."""
    sys.stdout.write(f"{json_text(document)}\n")
    sys.stdout.flush()


_WIDTH_MAX = 10_000


@dataclass(frozen=True, slots=True)
class Column:
    """A column. On a narrow terminal, the one with the highest `rank` is left out first, and those with 0 never."""

    title: str
    rank: int = 0
    right: bool = False


def fitted_table(
    console: Console, columns: Sequence[Column], rows: Sequence[Sequence[str]]
) -> tuple[Table, list[str]]:
    """A table that fits the console, and the titles of the columns that are left out.

    Without a terminal nothing is left out. Cells never lose text: where no column can be left out, they are folded.
    """
    kept = list(range(len(columns)))
    table = _table(columns, rows, kept)
    left_out: list[str] = []
    unbounded = console.options.update(width=_WIDTH_MAX)
    while console.is_terminal and console.measure(table, options=unbounded).maximum > console.width:
        last = max(kept, key=lambda index: columns[index].rank)
        if not columns[last].rank:
            break
        kept.remove(last)
        left_out.append(columns[last].title)
        table = _table(columns, rows, kept)
    return table, left_out


def _table(columns: Sequence[Column], rows: Sequence[Sequence[str]], kept: Sequence[int]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for index in kept:
        column = columns[index]
        table.add_column(column.title, justify="right" if column.right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(row[index]) for index in kept))
    return table


EXIT_FAILED = 1
EXIT_MISCONFIGURED = 2
EXIT_INTERRUPTED = 130


_KEY_REMEDY: Final = "set HEADRACE_API_KEY, or HEADRACE_API_KEY_FILE to a file with a key"
_TLS_REMEDY: Final = (
    "where it has TLS, set HEADRACE_TLS_AUTHORITY_FILE to its authority's certificate, and where it asks for a "
    "certificate, HEADRACE_TLS_CERTIFICATE_FILE and HEADRACE_TLS_KEY_FILE"
)
# By a part of the message. The first that occurs applies.
_REMEDIES: Final = (
    ("http1.x server", "that port serves HTTP: name the port for gRPC, with `headrace up` 6 lower"),
    (
        "WRONG_VERSION_NUMBER",
        "it has no TLS: unset the variables HEADRACE_TLS_..., or name its port with TLS",
    ),
    (
        "CERTIFICATE_VERIFY_FAILED",
        "HEADRACE_TLS_AUTHORITY_FILE must name the authority of its certificate",
    ),
    ("Hostname Verification", "call it by a name or address that its certificate has"),
    ("resolving", "check the name of the host"),
    (
        "Method not found",
        "another service listens there: name its address for clients with --router",
    ),
    ("message larger than max", "shorten the text: the longest context of the models bounds it"),
    ("API key is required", _KEY_REMEDY),
    ("API key is not known", _KEY_REMEDY),
    ("does not answer", _TLS_REMEDY),
)


_Options = ParamSpec("_Options")


_USES: Final[dict[Callable[..., None], tuple[str, str, type[TyperCommand]]]] = {}
"""Of each command its name, examples and class."""
_GROUPS: Final = {
    "certs": "Creates certificates of roles, for mutual TLS.",
    "incident": "Stores what happened, draws it, and replays decisions.",
    "keys": "Creates API keys of clients.",
    "planner": "Plans the numbers of prefill and decode workers.",
    "policy": "Shows and changes the policy that all routers follow.",
    "token": "Creates keys and role tokens.",
}


def command(
    name: str, examples: str, cls: type[TyperCommand] = TyperCommand
) -> Callable[[Callable[_Options, Coroutine[Any, Any, None] | None]], Callable[_Options, None]]:
    """Makes a function a command, which runs to its end. It raises typer.Exit when it fails.

    `name` may begin with that of a group. The help has each of the examples in a line.
    """

    def made(
        function: Callable[_Options, Coroutine[Any, Any, None] | None],
    ) -> Callable[_Options, None]:
        @wraps(function)
        def run(*args: _Options.args, **options: _Options.kwargs) -> None:
            with failures_as_exit():
                work = function(*args, **options)
                if work is not None:
                    asyncio.run(work)

        _USES[run] = name, examples, cls
        return run

    return made


def register(app: typer.Typer, commands: Mapping[str, Iterable[Callable[..., None]]]) -> None:
    """Adds commands by their headings in the help."""
    groups = {"": app}
    for heading, functions in commands.items():
        for function in functions:
            full_name, examples, cls = _USES[function]
            group, _, name = full_name.rpartition(" ")
            if group not in groups:
                groups[group] = typer.Typer(no_args_is_help=True, help=_GROUPS[group])
                app.add_typer(groups[group], name=group, rich_help_panel=heading)
            # Rich's help joins lines, and begins another one at an empty line.
            lines = examples.split("   |   ")
            epilog = "\n\n".join(("Examples:" if lines[1:] else "Example:", *lines))
            panel = None if group else heading
            groups[group].command(name, cls=cls, epilog=epilog, rich_help_panel=panel)(function)


@contextmanager
def failures_as_exit() -> Iterator[None]:
    """Turns every expected failure into typer.Exit."""
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
    except UnicodeError:
        # An argument or a line that Python has read with surrogates in place of bytes.
        _fail(
            ConfigError("a text is not UTF-8: convert it, such as with `iconv -t UTF-8`"),
            EXIT_MISCONFIGURED,
        )
    except BrokenPipeError:
        sys.stderr.close()
        raise typer.Exit(EXIT_FAILED) from None
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _fail(InternalError(f"{where}{error.strerror or error}"), EXIT_FAILED)


def _fail(error: HeadraceError, status: int) -> None:
    line = with_remedy(" ".join(error.detail.split()))
    notice_console().print(f"headrace: {line}", style="red", markup=False)
    raise typer.Exit(status) from None


def with_remedy(message: str) -> str:
    """The message of a failed call, with what the user of a command can do."""
    for part, remedy in _REMEDIES:
        if part in message:
            # The client library names headers, which commands do not have.
            return f"{message.partition('; send yours as metadata')[0].rstrip(':')}; {remedy}"
    return message
