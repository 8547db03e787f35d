"""Fills in what a command's user left out, from the context in use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

from headrace_cli.addresses import check_address
from headrace_cli.contexts.store import LOCAL, Context, load_contexts
from headrace_cli.exit_status import failures_as_exit
from headrace_cli.options import REGISTRY_VARIABLE, ROUTER_VARIABLE
from headrace_common.errors import ConfigError

CONTEXT_OPTION: Final = "context"
# Of a command that calls any server, at this URL.
_URL: Final = "url"
_ADDRESSES: Final = ("router", "registry", "internal")
_VARIABLES: Final = {"router": ROUTER_VARIABLE, "registry": REGISTRY_VARIABLE}
_GIVEN: Final = ("COMMANDLINE", "ENVIRONMENT")
_TLS: Final = ("tls_authority_file", "tls_certificate_file", "tls_key_file")
# Variables of a group replace the context's whole group.
_CREDENTIALS: Final = (
    (_TLS, tuple(f"HEADRACE_{name.upper()}" for name in _TLS)),
    (("token_file",), ("HEADRACE_TOKEN_FILE",)),
    (("api_key_file",), ("HEADRACE_API_KEY_FILE", "HEADRACE_API_KEY")),
)


class AddressedCommand(TyperCommand):
    """A command that calls a deployment: by its flags, else by variables, else by the context in use."""

    def invoke(self, ctx: Any) -> Any:
        with failures_as_exit():
            apply_context(ctx)
        return super().invoke(ctx)


class AddressedGroup(TyperGroup):
    """As AddressedCommand, for a command that has others below it."""

    def invoke(self, ctx: Any) -> Any:
        with failures_as_exit():
            apply_context(ctx)
        return super().invoke(ctx)


def apply_context(ctx: typer.Context) -> None:
    """Checks the addresses of a command and completes them. Sets the variables of the context's credentials.

    A command that names another address than the context's gets nothing of the context: its credentials go to
    its own deployment only. Raises ConfigError, or NotFound for an unknown context.
    """
    given = dict(_given_addresses(ctx))
    name, named_by_flag = _chosen(ctx)
    if name == LOCAL:
        return
    context = _context(name)
    if context is None:
        return
    other = [option for option, text in given.items() if text != getattr(context, option)]
    if ctx.params.get(_URL):
        other.append(_URL)
    if other and named_by_flag:
        raise ConfigError(
            f"--{other[0]} is not that of the context {name}: leave out --{other[0]} or --context"
        )
    if other:
        return
    missing = [option for option in _ADDRESSES if option in ctx.params and option not in given]
    ctx.params.update({option: getattr(context, option) for option in missing})
    os.environ.update(_variables(context))


def _given_addresses(ctx: typer.Context) -> Iterator[tuple[str, str]]:
    for option in _ADDRESSES:
        source = ctx.get_parameter_source(option)
        text = ctx.params.get(option)
        if source is not None and source.name in _GIVEN and text:
            what = f"--{option}" if source.name == _GIVEN[0] else _VARIABLES[option]
            yield option, check_address(what, text)


def _chosen(ctx: typer.Context) -> tuple[str, bool]:
    """The name of the context asked for, empty for the current one, and whether a flag names it."""
    root = ctx.find_root()
    source = root.get_parameter_source(CONTEXT_OPTION)
    return root.params.get(CONTEXT_OPTION, ""), source is not None and source.name == _GIVEN[0]


def _context(name: str) -> Context | None:
    contexts = load_contexts()
    name = name or contexts.current
    return contexts.find(name) if name else None


def _variables(context: Context) -> dict[str, str]:
    found: dict[str, str] = {}
    for settings, variables in _CREDENTIALS:
        if not any(os.environ.get(variable) for variable in variables):
            found |= {
                variable: getattr(context, setting)
                for setting, variable in zip(settings, variables, strict=False)
                if getattr(context, setting)
            }
    return found
