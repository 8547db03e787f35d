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

from headrace_common.config import URL_USER, ServiceConfig
from headrace_common.errors import ConfigError
from headrace_common.version import version

_PROXY: Final = "it is gone: remove it; a proxy in front bounds connections and rates by host"

_LOOK_ASIDE: Final = "it is gone with look-aside: remove it; routers stream all answers"
_NO_LISTENER: Final = (
    "it is gone from workers: remove it; http_listen serves clients of a gateway on decode workers"
)

_CONSTANT: Final = "it is gone: remove it"
_VALUE: Final = "it is gone: remove it; the value is"
_OVERLAP: Final = "it is gone: remove it; a request starts when all of its KV has arrived"
_VLLM: Final = "it is gone: give it to vLLM in engine_args, as"
_FETCH: Final = "it is gone: set kv_fetch_timeout_s, which bounds both waits"
_ROUTERS_TLS: Final = (
    "it is gone from decode workers: http_listen has the tls_ files; routers may have others"
)

REMOVED: Final = {
    "prefix_wait_s": f"{_CONSTANT}; prompts wait 0.05 s for a cached prefix",
    "retry_budget": f"{_CONSTANT}; `headrace policy set retry_budget=N` bounds the retries of all routers",
    "migration_wait_s": "it is gone: set worker_wait_s, which bounds this wait too",
    "max_queued_tasks": f"{_CONSTANT}; max_concurrent_requests bounds the prefill queue too",
    "profile": f"{_CONSTANT}; routers predict from the prefills that they measure",
    "max_trace_bytes": f"{_CONSTANT}; a trace has 4 MiB of spans at most",
    "max_stored_trace_bytes": f"{_CONSTANT}; traces have 64 MiB of spans at most",
    "max_bytes_per_token": f"{_CONSTANT}; text has 16 bytes for each token of the context at most",
    "max_request_bytes": f"{_CONSTANT}; the bound follows from the longest context of the models",
    "max_calls_per_caller": f"{_CONSTANT}; the bound is 2,048, or twice max_concurrent_requests",
    "connection_idle_s": f"{_CONSTANT}; connections without a request are closed after 300 s",
    "look_aside": _LOOK_ASIDE,
    "ticket_ttl_s": _LOOK_ASIDE,
    "max_unused_tickets": _LOOK_ASIDE,
    "listen": _NO_LISTENER,
    "advertise": _NO_LISTENER,
    "connection_age_s": f"{_CONSTANT}; a connection of a client takes no new RPC after an hour",
    "max_connections": f"{_CONSTANT}; the bound is 4,096, or four times max_concurrent_requests",
    "max_streams_per_connection": f"{_CONSTANT}; a connection has 1,024 RPCs in flight at most",
    "max_connections_per_host": _PROXY,
    "max_new_connections_per_s": _PROXY,
    "host_block_s": "it is gone: remove it; no host is blocked",
    "max_rejected_per_s": _PROXY,
    "max_unary_per_s": _PROXY,
    "credential_check_s": f"{_VALUE} 60 s",
    "internal_connection_age_s": f"{_VALUE} an hour",
    "seed": f"{_VLLM} --seed",
    "enforce_eager": f"{_VLLM} --enforce-eager",
    "transport": "it is gone: remove it; Mooncake moves KV, over RDMA where the host has it, else over TCP",
    "local_broadcast": f"{_VALUE} true, where the ranks are on processors",
    "kv_offload_min_uses": f"{_VALUE} 1",
    "kv_send_from_host": f"{_VALUE} true",
    "registration_timeout_s": f"{_VALUE} 30 s",
    "place_zone": "it is gone: set place to zone=NAME",
    "place_rack": "it is gone: set place to rack=NAME",
    "place_host": "it is gone: set place to host=NAME",
    "digest_mismatch_limit": f"{_VALUE} 3",
    "overlap_layers": _OVERLAP,
    "overlap_wait_s": _OVERLAP,
    "task_timeout_s": f"{_VALUE} 600 s",
    "link_gbit_per_s": "it is gone: remove it; traces compare a transfer with the best one to the same host",
    "recording_file": "it is gone: remove it; `headrace simulate --planner` tries other rules",
    "decision_count": f"{_VALUE} 1,000",
    "kubernetes_call_timeout_s": f"{_VALUE} 10 s",
    "kv_pool_timeout_s": _FETCH,
    "prefix_fetch_timeout_s": _FETCH,
    "constraint_cpu_s": f"{_VALUE} 0.5 s",
    "listen_tls_certificate_file": _ROUTERS_TLS,
    "listen_tls_key_file": _ROUTERS_TLS,
    "listen_tls_authority_file": _ROUTERS_TLS,
    "traces_sampler_arg": "it is gone: set traces_sampler to SAMPLER=SHARE, as parentbased_traceidratio=0.05",
    "max_queued_tokens": f"{_CONSTANT}; the bound is 4,194,304, or 4,096 for each of max_concurrent_requests",
    "images_mib": f"{_VALUE} 1,024 MiB",
    "conversations_keep_s": f"{_VALUE} 3,600 s; conversations_mib bounds them too, and 0 keeps none",
    "trace_count": f"{_VALUE} 1,024 requests",
    "http_advertise": "it is gone: set internal_advertise; http_listen on 0.0.0.0 is reached at its host",
    "kv_promised_share": f"{_VALUE} 0.5",
    "member_ttl_s": "it is gone: set lease_ttl_s; the registry removes a silent worker after twice as long",
    "request_timeout_s": "it is gone: set default_deadline_s, as on routers",
    "engine": "it is gone: remove it; model sim or sim:NAME=VALUE is the simulated engine, every other model is vLLM's",
    "trace_layers": "it is gone: remove it; headrace trace shows the times of every layer of a link",
}
"""By the name of the setting. The error about the unknown setting ends with this text."""


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


def _suggestion(name: str, known: Sequence[str], prefix: str = "") -> str:
    setting = name.removeprefix("--").removeprefix(prefix).replace("-", "_").lower()
    if setting in REMOVED:
        return REMOVED[setting]
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else "remove it, or see --help for the names"


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
                f": unknown environment variable: {_suggestion(variable, list(known), prefix)}"
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
        remedy = item["msg"].removeprefix("Value error, ")
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
