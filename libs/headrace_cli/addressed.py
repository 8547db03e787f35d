"""Which deployment a command calls: by its flags, else by variables, else by the user's file, else this machine's."""

from __future__ import annotations

import os
import stat
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import typer
from typer.core import TyperCommand

from headrace_cli.options import REGISTRY_VARIABLE, ROUTER_VARIABLE
from headrace_cli.output import failures_as_exit
from headrace_common.config import split_host_port
from headrace_common.errors import ConfigError

FILE_VARIABLE: Final = "HEADRACE_CONFIG"
_OLD_FILE: Final = "contexts.json"
_OLD_VARIABLE: Final = "HEADRACE_CONTEXT"
_ADDRESSES: Final = ("router", "registry", "internal")
_VARIABLES: Final = {"router": ROUTER_VARIABLE, "registry": REGISTRY_VARIABLE}
_GIVEN: Final = ("COMMANDLINE", "ENVIRONMENT")
_TLS: Final = ("tls_authority_file", "tls_certificate_file", "tls_key_file")
# Variables of a group replace the file's whole group.
_CREDENTIALS: Final = (
    (_TLS, tuple(f"HEADRACE_{name.upper()}" for name in _TLS)),
    (("token_file",), ("HEADRACE_TOKEN_FILE",)),
    (("api_key_file",), ("HEADRACE_API_KEY_FILE", "HEADRACE_API_KEY")),
)
_KEYS: Final = frozenset((*_ADDRESSES, *_TLS, "token_file", "api_key_file"))


class AddressedCommand(TyperCommand):
    """A command that calls a deployment."""

    def invoke(self, ctx: Any) -> Any:
        with failures_as_exit():
            apply_file(ctx)
        return super().invoke(ctx)


def check_address(what: str, text: str) -> str:
    """Returns the address of a server, "host:port". `what` names its source. Raises ConfigError with the remedy."""
    try:
        if split_host_port(text)[1] == 0:
            raise ValueError("no server has port 0: name its port, such as 127.0.0.1:7050")
    except ValueError as error:
        raise ConfigError(f"{what} is {text!r}: {error}") from error
    return text


def apply_file(ctx: typer.Context) -> None:
    """Checks the addresses of a command and completes them. Sets the variables of the file's credentials.

    A command that names another address than the file's gets nothing of the file: its credentials go to its own
    deployment only. Raises ConfigError.
    """
    given = dict(_given_addresses(ctx))
    file = read_file()
    if not file or any(text != file.get(option) for option, text in given.items()):
        return
    missing = [option for option in _ADDRESSES if option in ctx.params and option not in given]
    ctx.params.update({option: file.get(option, "") for option in missing})
    for settings, variables in _CREDENTIALS:
        if not any(os.environ.get(variable) for variable in variables):
            named = zip(settings, variables, strict=False)
            os.environ.update({variable: file[name] for name, variable in named if name in file})


def read_file() -> Mapping[str, str]:
    """The settings of the user's file; paths are absolute. Empty without a file. Raises ConfigError."""
    if os.environ.get(_OLD_VARIABLE):
        raise ConfigError(
            f"{_OLD_VARIABLE} is no longer read: name a file by {FILE_VARIABLE} (docs/commands.md)"
        )
    base = os.environ.get("XDG_CONFIG_HOME", "")
    folder = (Path(base) if base else Path.home() / ".config") / "headrace"
    named = os.environ.get(FILE_VARIABLE)
    if named == "":
        return {}
    path = Path(named) if named else folder / "config.toml"
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_uid not in (0, os.getuid()) or stat.S_IMODE(status.st_mode) & 0o022:
                raise ConfigError(
                    f"other users can change {path}: run `chown $USER {path}; chmod 600 {path}`"
                )
            values = tomllib.load(file)
    except FileNotFoundError:
        if named:
            raise ConfigError(f"{FILE_VARIABLE} names {path}, which does not exist") from None
        if (folder / _OLD_FILE).exists():
            raise ConfigError(
                f"{folder / _OLD_FILE} is no longer read: write its addresses and files to {path} "
                "(docs/commands.md), and remove it"
            ) from None
        return {}
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    return _checked(path, values)


def _checked(path: Path, values: Mapping[str, Any]) -> dict[str, str]:
    """The settings with absolute paths. Raises ConfigError for one that is wrong."""
    unknown = sorted(values.keys() - _KEYS)
    if unknown or not all(isinstance(value, str) and value for value in values.values()):
        where = f" at {unknown[0]}" if unknown else ""
        names = ", ".join(sorted(_KEYS))
        raise ConfigError(f"{path} is wrong{where}: it has texts only, named {names}")
    if "router" not in values:
        raise ConfigError(f"{path} names no router: write router = 'HOST:PORT'")
    for option in _ADDRESSES:
        if option in values:
            check_address(f"{option} of {path}", values[option])
    absolute = path.absolute().parent
    return {
        name: value if name in _ADDRESSES else str(absolute / Path(value).expanduser())
        for name, value in values.items()
    }


def _given_addresses(ctx: typer.Context) -> Iterator[tuple[str, str]]:
    for option in _ADDRESSES:
        source = ctx.get_parameter_source(option)
        text = ctx.params.get(option)
        if source is not None and source.name in _GIVEN and text:
            what = f"--{option}" if source.name == _GIVEN[0] else _VARIABLES[option]
            yield option, check_address(what, text)
