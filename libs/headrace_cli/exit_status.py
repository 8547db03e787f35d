"""Runs a command and turns its failure into one line on stderr and an exit status."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import typer

from headrace_cli.console import notice_console
from headrace_common.errors import Cancelled, ConfigError, HeadraceError, InternalError

EXIT_FAILED = 1
EXIT_MISCONFIGURED = 2
EXIT_INTERRUPTED = 130


def run_command(work: Coroutine[Any, Any, None]) -> None:
    """Runs `work` to its end. Raises typer.Exit when it fails."""
    with failures_as_exit():
        asyncio.run(work)


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
    except BrokenPipeError:
        sys.stderr.close()
        raise typer.Exit(EXIT_FAILED) from None
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _fail(InternalError(f"{where}{error.strerror or error}"), EXIT_FAILED)


def _fail(error: HeadraceError, status: int) -> None:
    line = " ".join(error.detail.split())
    notice_console().print(f"headrace: {line}", style="red", markup=False)
    raise typer.Exit(status) from None
