"""Reads the settings of a service from flags, environment variables and a file."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
import textwrap
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar, get_args

from pydantic import SecretStr, ValidationError
from pydantic.fields import FieldInfo

from headrace_common.config import URL_USER, ServiceConfig, problem_text
from headrace_common.errors import ConfigError
from headrace_common.version import version

_MISSING = "\0missing"
# Kubernetes sets these in every container of a namespace with a Service of our name.
_KUBERNETES_LINK = re.compile(
    r"SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?"
)
# Variables of OpenTelemetry's standard, which our variable of the same setting overrides.
_SAMPLER: Final = "OTEL_TRACES_SAMPLER"
_SAMPLER_SHARE: Final = "OTEL_TRACES_SAMPLER_ARG"

Config = TypeVar("Config", bound=ServiceConfig)


@dataclass(frozen=True, slots=True)
class _Setting:
    """A value as given, and its source."""

    value: object
    source: str


def load_config(
    cls: type[Config], argv: Sequence[str] | None, *, prog: str, env_prefix: str
) -> Config:
    """Reads the settings. Flags override the environment, which overrides the file (--config FILE.toml).

    `argv` excludes the program's name; None means the arguments of this process. `env_prefix` is such
    as "HEADRACE_ROUTER_". Flags with secrets are wrong, because `ps` shows them. Raises ConfigError that lists every
    wrong setting with its source and remedy.
    `--help` prints the help and exits.
    """
    prefix = env_prefix.rstrip("_") + "_"
    problems: dict[str, str] = {}
    flags, config_flag = _read_flags(
        cls, sys.argv[1:] if argv is None else argv, prog, prefix, problems
    )
    environment = _read_environment(cls, os.environ, prefix, problems)
    path = config_flag or os.environ.get(f"{prefix}CONFIG", "")
    settings = {**_read_file(cls, path, problems), **environment, **flags}
    config: Config | None = None
    try:
        config = cls.model_validate({name: setting.value for name, setting in settings.items()})
    except ValidationError as error:
        problems.update(_explain(cls, error, settings, prefix))
    if problems or config is None:
        detail = "; ".join(f"{name}{problem}" for name, problem in problems.items())
        raise ConfigError(
            detail.replace("\n", " "), metadata={n: p.lstrip(": ") for n, p in problems.items()}
        )
    return config


def redacted(config: ServiceConfig) -> dict[str, Any]:
    """The settings as plain values for logs, without secrets and without the users in URLs."""
    plain: dict[str, Any] = {}
    for name in type(config).model_fields:
        value = getattr(config, name)
        if isinstance(value, SecretStr):
            plain[name] = "***" if value.get_secret_value() else ""
        else:
            plain[name] = URL_USER.sub("***@", value) if isinstance(value, str) else value
    return plain


def is_secret(field: FieldInfo) -> bool:
    """Whether the value must not be shown."""
    return field.annotation is SecretStr or SecretStr in get_args(field.annotation)


def flag_of(name: str) -> str:
    """The flag of a setting."""
    return "--" + name.replace("_", "-")


def variable_of(name: str, env_prefix: str) -> str:
    """The environment variable of a setting. `env_prefix` is as for load_config."""
    return f"{env_prefix}{name.upper()}"


def _suggestion(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    nearest = f"did you mean {close[0]}? " if close else ""
    return f"{nearest}--help has the names, and docs/upgrading.md those of earlier releases"


def _read_flags(
    cls: type[ServiceConfig], argv: Sequence[str], prog: str, prefix: str, problems: dict[str, str]
) -> tuple[dict[str, _Setting], str]:
    parser = _parser(cls, prog, prefix)
    given, unknown = parser.parse_known_args(_join_dashed_values(cls, argv))
    flags: dict[str, _Setting] = {}
    for name, value in vars(given).items():
        if value == _MISSING:
            problems[flag_of(name)] = ": needs a value, as in " + f"{flag_of(name)} VALUE"
        elif name in cls.model_fields and _shows_secret(cls.model_fields[name], value):
            problems[flag_of(name)] = f": {_secret_remedy(cls, name, prefix)}"
        elif value is not None:
            flags[name] = _Setting(value, f"flag {flag_of(name)}")
    known = [flag_of(name) for name in (*cls.model_fields, "config")]
    for flag in (text.partition("=")[0] for text in unknown):
        kind = "unknown flag" if flag.startswith("-") else "unexpected argument"
        problems[flag] = f": {kind}: {_suggestion(flag, known)}"
    config_file = flags.pop("config", None)
    return flags, str(config_file.value) if config_file else ""


def _join_dashed_values(cls: type[ServiceConfig], argv: Sequence[str]) -> list[str]:
    """Writes `--flag -value` as `--flag=-value`, because argparse takes `-value` for a flag."""
    flags = {flag_of(name) for name in cls.dashed_values}
    joined: list[str] = []
    for argument in argv:
        if joined and joined[-1] in flags and argument.startswith("-"):
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
    return joined


def _shows_secret(field: FieldInfo, value: str | None) -> bool:
    return value is not None and (is_secret(field) or URL_USER.search(value) is not None)


def _secret_remedy(cls: type[ServiceConfig], name: str, prefix: str) -> str:
    file = f"{name}_file"
    other = flag_of(file) if file in cls.model_fields else variable_of(name, prefix)
    return f"contains a secret, and every user of the host can read flags: set {other} instead"


def default_of(field: FieldInfo) -> str:
    """The default as help texts state it: "required", "default: none" for a secret, or "default: VALUE"."""
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(default, SecretStr):
        return "default: none"
    return f"default: {default!r}" if default in ("", None) else f"default: {default}"


def _parser(cls: type[ServiceConfig], prog: str, prefix: str) -> argparse.ArgumentParser:
    secrets = [variable_of(n, prefix) for n, field in cls.model_fields.items() if is_secret(field)]
    parser = argparse.ArgumentParser(
        prog=prog,
        description=textwrap.dedent(cls.__doc__ or "").strip().split("\n\n")[0],
        epilog=f"Flags override environment variables ({prefix}*), which override the file. "
        f'A file holds lines such as internal_listen = "127.0.0.1:7000".'
        + (f" Secrets have no flag, but variables: {', '.join(secrets)}." if secrets else ""),
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config",
        metavar="FILE.toml",
        nargs="?",
        const=_MISSING,
        help=f"TOML file of settings with the names below. [env: {prefix}CONFIG]",
    )
    parser.add_argument(
        "--version", action="version", version=f"{prog} {version()}", help="Show the version."
    )
    for name, field in cls.model_fields.items():
        if is_secret(field):
            # It is parsed, so that the error can name the remedy.
            parser.add_argument(
                flag_of(name), dest=name, nargs="?", const="", help=argparse.SUPPRESS
            )
            continue
        notes = f"[env: {variable_of(name, prefix)}; {default_of(field)}]"
        parser.add_argument(
            flag_of(name),
            dest=name,
            nargs="?",
            const="true" if field.annotation is bool else _MISSING,
            metavar=name.upper(),
            help=f"{field.description or ''} {notes}".strip().replace("%", "%%"),
        )
    return parser


def _read_environment(
    cls: type[ServiceConfig], environ: Mapping[str, str], prefix: str, problems: dict[str, str]
) -> dict[str, _Setting]:
    known = {variable_of(name, prefix): name for name in cls.model_fields}
    settings: dict[str, _Setting] = {}
    sampler, share = environ.get(_SAMPLER), environ.get(_SAMPLER_SHARE)
    if sampler or share:
        sampler = sampler or cls.model_fields["traces_sampler"].default.partition("=")[0]
        value = f"{sampler}={share}" if share else sampler
        settings["traces_sampler"] = _Setting(value, f"environment {_SAMPLER}")
    for variable, value in environ.items():
        if not variable.startswith(prefix) or variable == f"{prefix}CONFIG":
            continue
        if variable in known:
            settings[known[variable]] = _Setting(value, f"environment {variable}")
        elif not _KUBERNETES_LINK.fullmatch(variable.removeprefix(prefix)):
            problems[variable] = (
                f": unknown environment variable: {_suggestion(variable, list(known))}"
            )
    return settings


def _read_file(
    cls: type[ServiceConfig], path: str, problems: dict[str, str]
) -> dict[str, _Setting]:
    if not path:
        return {}
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        problems["--config"] = f": cannot read {path}: {error.strerror}: name a file that exists"
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        problems["--config"] = f": {path} is not TOML: {error}"
        return {}
    settings: dict[str, _Setting] = {}
    for name, value in table.items():
        if name in cls.model_fields:
            settings[name] = _Setting(value, f"file {path}")
        else:
            problems[name] = (
                f" (file {path}): unknown key: {_suggestion(name, list(cls.model_fields))}"
            )
    return settings


def _explain(
    cls: type[ServiceConfig], error: ValidationError, settings: Mapping[str, _Setting], prefix: str
) -> dict[str, str]:
    problems: dict[str, str] = {}
    for item in error.errors(include_url=False):
        remedy = problem_text(item)
        name = str(item["loc"][0]) if item["loc"] else ""
        setting = settings.get(name)
        if setting is not None:
            secret = is_secret(cls.model_fields[name])
            shown = "***" if secret else repr(setting.value)
            problems[name] = f" = {shown} ({setting.source}): {remedy}"
        elif item["type"] == "missing":
            variable = variable_of(name, prefix)
            problems[name] = f": is required: set {flag_of(name)}, {variable} or {name} in the file"
        else:
            problems[name or "settings"] = f": {remedy}"
    return problems
